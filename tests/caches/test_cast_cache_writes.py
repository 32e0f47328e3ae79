"""However a weight or an activation is written, the next product sees what was written."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hmp
from cast_cache_kit import LOW, X, assert_caches_change_nothing, assert_same_bits, caches, each, grads, look, loss, net, params

# torch 2.7 hands numpy memory that numpy will not write to.
WRITABLE = np.from_dlpack(torch.ones(1)).flags.writeable


def _taken_and_dropped(write):
    """Each parameter is written through something that is gone before the next forward."""

    def scenario(model):
        for p in model.parameters():
            write(p)

    return scenario


def _flat_buffer(model):
    flat = _flatten_dense_tensors(list(model.parameters())).detach()
    for p, part in zip(model.parameters(), _unflatten_dense_tensors(flat, list(model.parameters())), strict=True):
        p.data = part
    look(model)
    flat.mul_(0.5)


def _half(sd):
    return {k: v * 0.5 for k, v in sd.items()}


def _state_dict_values(model):
    for value in model.state_dict().values():
        value.data.mul_(0.5)


def _item_of_storage(p):
    storage = p.untyped_storage()
    storage[3] = 7


def _swap(p):
    torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach() * 0.5))


def _by_numpy(array):
    array *= 0.5


WRITES = {
    "p.data.mul_": _taken_and_dropped(lambda p: p.data.mul_(0.5)),
    "p.data =": _taken_and_dropped(lambda p: setattr(p, "data", p.data * 0.5)),
    "p.data = twice": _taken_and_dropped(lambda p: (setattr(p, "data", p.data * 0.5), setattr(p, "data", p.data * 0.5))),
    "p.data[0] =": _taken_and_dropped(lambda p: p.data.__setitem__(0, 0.5)),
    "p.data.copy_": _taken_and_dropped(lambda p: p.data.copy_(p.data * 0.5)),
    "p.set_": _taken_and_dropped(torch.no_grad()(lambda p: p.set_(p.detach() * 0.5))),
    "p.copy_": _taken_and_dropped(torch.no_grad()(lambda p: p.copy_(p * 0.5))),
    "p[0] =": _taken_and_dropped(torch.no_grad()(lambda p: p.__setitem__(0, 0.5))),
    "p.zero_": _taken_and_dropped(torch.no_grad()(lambda p: p.zero_())),
    "out=p": _taken_and_dropped(torch.no_grad()(lambda p: torch.mul(p, 0.5, out=p))),
    "in inference_mode": _taken_and_dropped(torch.inference_mode()(lambda p: p.mul_(0.5))),
    "a view in inference_mode": _taken_and_dropped(torch.inference_mode()(lambda p: p.view(-1)[:3].mul_(0.5))),
    "p.detach().mul_": _taken_and_dropped(lambda p: p.detach().mul_(0.5)),
    "p.detach().data.mul_": _taken_and_dropped(lambda p: p.detach().data.mul_(0.5)),
    "p[0].data.zero_": _taken_and_dropped(lambda p: p[0].data.zero_()),
    "p.view(-1).data.mul_": _taken_and_dropped(lambda p: p.view(-1).data.mul_(0.5)),
    "p.T.data.mul_": _taken_and_dropped(lambda p: p.T.data.mul_(0.5)),
    "p.data.view(-1).mul_": _taken_and_dropped(lambda p: p.data.view(-1).mul_(0.5)),
    "p.detach().numpy()": _taken_and_dropped(lambda p: _by_numpy(p.detach().numpy())),
    "p.data.numpy()": _taken_and_dropped(lambda p: _by_numpy(p.data.numpy())),
    "p.numpy(force=True)": _taken_and_dropped(lambda p: _by_numpy(p.numpy(force=True))),
    "np.asarray": _taken_and_dropped(lambda p: _by_numpy(np.asarray(p.detach()))),
    **({"np.from_dlpack": _taken_and_dropped(lambda p: _by_numpy(np.from_dlpack(p.detach()).view()))} if WRITABLE else {}),
    "torch.from_dlpack": _taken_and_dropped(lambda p: torch.from_dlpack(p.detach()).mul_(0.5)),
    "to_dlpack": _taken_and_dropped(lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())).mul_(0.5)),
    "storage.fill_": _taken_and_dropped(lambda p: p.untyped_storage().fill_(0)),
    "storage[i] =": _taken_and_dropped(_item_of_storage),
    "storage.copy_": _taken_and_dropped(lambda p: p.untyped_storage().copy_((p.detach() * 0.5).untyped_storage())),
    "typed storage": _taken_and_dropped(lambda p: p.storage().fill_(0.25)),
    "Parameter(p).data": _taken_and_dropped(lambda p: torch.nn.Parameter(p).data.mul_(0.5)),
    "share_memory_": _taken_and_dropped(lambda p: p.share_memory_().data.mul_(0.5)),
    "init": _taken_and_dropped(torch.nn.init.ones_),
    "swap_tensors": _taken_and_dropped(_swap),
    "vector_to_parameters": lambda m: vector_to_parameters(parameters_to_vector(m.parameters()).detach() * 0.5, m.parameters()),
    "a flat buffer": _flat_buffer,
    "load_state_dict": lambda m: m.load_state_dict(_half(m.state_dict())),
    "load_state_dict assign": lambda m: m.load_state_dict(_half(m.state_dict()), assign=True),
    "load_state_dict twice": lambda m: [m.load_state_dict(_half(m.state_dict())) for _ in range(2)],
    "state_dict values": _state_dict_values,
    "weight = Parameter": lambda m: setattr(m[0], "weight", torch.nn.Parameter(m[0].weight.detach() * 0.5)),
    "clip_grad and prune": lambda m: torch.nn.utils.prune.remove(torch.nn.utils.prune.l1_unstructured(m[0], "weight", 0.5), "weight"),
    "apply": lambda m: m.apply(lambda layer: [p.data.mul_(0.5) for p in layer.parameters(recurse=False)]),
    "_apply": lambda m: m._apply(lambda t: t * 0.5),
    "share_memory": lambda m: (m.share_memory(), look(m), [p.data.mul_(0.5) for p in m.parameters()]),
    "to float64 and back": lambda m: (m.double(), look(m, X.double()), [p.data.mul_(0.5) for p in m.parameters()], m.float()),
    "half and back": lambda m: (m.half(), m.float()),
    "to bfloat16 and back": lambda m: (m.bfloat16(), look(m), m.float()),
    "to_empty": lambda m: (m.zero_grad(), m.to_empty(device="cpu"), [torch.nn.init.constant_(p, 0.5) for p in m.parameters()]),
}


def _check_weight_write(name):
    write = WRITES[name]

    def scenario():
        model, seen = net(), []
        for _ in range(2):
            before = look(model)
            write(model)
            after = look(model)
            seen += [before, after]
            assert len(seen) > 2 or name in ("p.numpy(force=True)", "to bfloat16 and back") or not torch.equal(before, after)
            for _ in range(2):
                loss(model).backward()
            write(model)
            loss(model).backward()
            seen += [look(model), grads(model)]
        return seen, params(model)

    assert_caches_change_nothing(scenario)
    # and what the last forward gave is what plain torch gives with the casts written out
    with caches(True):
        model = net()
        look(model), write(model), look(model)
        got = look(model)
    assert_same_bits([got], [_by_hand(model, X)])


def test_a_written_weight_is_cast_anew():
    each(WRITES, _check_weight_write)


@torch.no_grad()
def _by_hand(model, x):
    with hmp.disable_casts():
        for layer in model:
            x = torch.relu(x) if isinstance(layer, torch.nn.ReLU) else _linear(x, layer)
        return x.float()


def _linear(x, layer):
    return torch.nn.functional.linear(x.to(LOW), layer.weight.to(LOW), layer.bias.to(LOW))


ALIASES = {
    "p.data": lambda p: p.data,
    "p.detach()": lambda p: p.detach(),
    "a view": lambda p: p.detach().view(-1),
    "p.detach().data": lambda p: p.detach().data,
    "C's data": lambda p: torch._C.TensorBase.data.__get__(p),
    "numpy": lambda p: p.detach().numpy(),
    "data.numpy": lambda p: p.data.numpy(),
    "asarray": lambda p: np.asarray(p.detach()),
    **({"dlpack": lambda p: np.from_dlpack(p.detach())} if WRITABLE else {}),
    "torch's dlpack": lambda p: torch.from_dlpack(p.detach()),
    "storage": lambda p: p.untyped_storage(),
    "typed storage": lambda p: p.storage(),
    "another Parameter": lambda p: torch.nn.Parameter(p.data),
    "set_ to its storage": lambda p: torch.empty(0).set_(p.detach()),
}


def _write(alias):
    if hasattr(alias, "fill_") and not isinstance(alias, torch.Tensor):
        alias.fill_(0)
    else:
        with torch.no_grad():
            alias *= 0.5


@pytest.mark.parametrize("when", ["before convert", "before the copy", "after the copy"])
def test_a_weight_written_through_an_alias_that_is_held_is_cast_anew(when):
    names = ("p.data", "numpy", "torch's dlpack", "storage") if when == "before convert" else ALIASES
    each(names, lambda name: _check_weight_alias(name, when))


def _check_weight_alias(name, when):
    def scenario():
        model = net()
        if when == "before convert":
            hmp.revert()
            held = [ALIASES[name](p) for p in model.parameters()]
            hmp.convert(policy="torch-cpu")
        elif when == "before the copy":
            held = [ALIASES[name](p) for p in model.parameters()]
        first = look(model)
        if when == "after the copy":
            held = [ALIASES[name](p) for p in model.parameters()]
        for alias in held:
            _write(alias)
        second = look(model)
        assert not torch.equal(first, second)
        for _ in range(2):
            loss(model).backward()
            for alias in held:
                _write(alias)
        third = look(model)
        del alias, held
        return first, second, third, grads(model), look(model), params(model)

    assert_caches_change_nothing(scenario, hits=False)


def test_a_parameter_in_numpys_memory_is_never_kept():
    array = np.ones((8, 16), dtype=np.float32)
    with caches(True), torch.no_grad():
        weight = torch.nn.Parameter(torch.from_numpy(array))
        for value in (1, 2, 3):
            array[:] = value
            for _ in range(2):
                assert torch.equal(torch.nn.functional.linear(torch.ones(1, 16), weight).float(), torch.full((1, 8), 16.0 * value))
        assert hmp.cache_info().entries == 0


@pytest.mark.parametrize("swap", ["data.copy_", "copy_", "data =", "load_state_dict", "AveragedModel", "swap_tensors"])
def test_weights_swapped_for_their_average_and_back(swap):
    def scenario():
        model, seen = net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        for _ in range(3):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            average.update_parameters(model)
            seen += [look(model), look(average)]
            ema = [p.detach().clone() for p in average.module.parameters()]
            backup = [p.detach().clone() for p in model.parameters()]
            state = copy.deepcopy(model.state_dict())
            for values, saved in ((ema, average.module.state_dict()), (backup, state)):
                with torch.no_grad():
                    for p, v in zip(model.parameters(), values, strict=True):
                        if swap == "data.copy_":
                            p.data.copy_(v)
                        elif swap == "copy_":
                            p.copy_(v)
                        elif swap == "data =":
                            p.data = v
                        elif swap == "swap_tensors":
                            torch.utils.swap_tensors(p, torch.nn.Parameter(v))
                if swap == "load_state_dict":
                    model.load_state_dict(saved)
                seen.append(look(model))
        return seen, params(model)

    # an optimizer's state refers to the parameters that swap_tensors takes from it: torch's own affair, the same in both
    assert_caches_change_nothing(scenario)


@pytest.mark.parametrize("conversion", ["double", "half", "to"])
def test_modules_that_swap_tensors_on_conversion_do_so(conversion):
    def scenario():
        model = net()
        before = look(model)
        for _ in range(3):
            loss(model).backward()
        model.zero_grad()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            getattr(model, conversion)(*([torch.bfloat16] if conversion == "to" else []))
            model.float()
            model.load_state_dict(_half(model.state_dict()))
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        return before, look(model), params(model)

    assert_caches_change_nothing(scenario)


INPUT_WRITES = {
    "x.mul_": lambda x: x.mul_(0.5),
    "x[0] =": lambda x: x.__setitem__(0, 0.5),
    "a view": lambda x: x.view(-1)[:7].mul_(0.5),
    "x.data.mul_": lambda x: x.data.mul_(0.5),
    "x.view(-1).data.mul_": lambda x: x.view(-1).data.mul_(0.5),
    "x.data =": lambda x: setattr(x, "data", x.data * 0.5),
    "x.data = twice": lambda x: (setattr(x, "data", x.data * 0.5), setattr(x, "data", x.data * 0.5)),
    "x.set_": lambda x: x.set_(x * 0.5),
    "numpy": lambda x: _by_numpy(x.numpy()),
    "numpy of a view": lambda x: _by_numpy(x.view(-1)[3:].numpy()),
    "asarray": lambda x: _by_numpy(np.asarray(x)),
    **({"dlpack": lambda x: _by_numpy(np.from_dlpack(x))} if WRITABLE else {}),
    "torch's dlpack": lambda x: torch.from_dlpack(x).mul_(0.5),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "out=": lambda x: torch.mul(x, 0.5, out=x),
    "copy_": lambda x: x.copy_(x * 0.5),
    "_foreach_mul_": lambda x: torch._foreach_mul_([x], 0.5),
    "resize": lambda x: (x.resize_(2, 16), x.mul_(0.5), x.resize_(4, 16)),
}


@pytest.mark.parametrize("kind", ["fresh", "view", "from_numpy", "shared"])
def test_an_activation_written_between_two_products_is_cast_anew(kind):
    # torch does not resize a view, nor numpy's memory
    each(set(INPUT_WRITES) - ({"resize"} if kind in ("view", "from_numpy") else set()), lambda name: _check_input_write(name, kind))


def _check_input_write(name, kind):
    def make():
        x = X.clone()
        if kind == "view":
            return torch.cat([x, x])[:4]
        if kind == "from_numpy":
            return torch.from_numpy(x.numpy().copy())
        return x.share_memory_() if kind == "shared" else x

    def scenario():
        model, seen = net(), []
        for grad_on in (False, True):
            with torch.set_grad_enabled(grad_on):
                x = make()
                for turn in range(3):
                    seen += [model(x), model[0](x)]  # x is the last that was cast before it is written
                    INPUT_WRITES[name](x)
                    seen += [model[0](x), model(x)]
                    assert turn or not torch.equal(seen[-3], seen[-2])
        return seen

    assert_caches_change_nothing(scenario, hits=kind in ("fresh", "view"))


def test_an_activation_written_through_an_alias_taken_before_is_cast_anew():
    each(INPUT_ALIASES, _check_input_alias)


INPUT_ALIASES = {
    "x.data": lambda x: x.data,
    "a view's data": lambda x: x.view(-1).data,
    "numpy": lambda x: x.numpy(),
    **({"dlpack": lambda x: np.from_dlpack(x)} if WRITABLE else {}),
    "storage": lambda x: x.untyped_storage(),
}


def _check_input_alias(name):
    def scenario():
        seen = []
        for grad_on in (False, True):
            with torch.set_grad_enabled(grad_on):
                model, x = net(), X.clone()
                alias = INPUT_ALIASES[name](x)
                seen += [model(x), model[0](x)]
                _write(alias)
                seen += [model[0](x), model(x)]
                assert not torch.equal(seen[-3], seen[-2])
        return seen

    assert_caches_change_nothing(scenario)


def test_a_buffer_that_a_loader_fills_again_is_read_again():
    """The usual loop of a server: one array, written for each request."""
    array = np.zeros((4, 16), dtype=np.float32)
    with caches(True), torch.no_grad():
        model, x = net()[0], torch.from_numpy(array)
        requests = [X * (request + 1) for request in range(3)]
        expected = [model(request) for request in requests]
        for request, answer in zip(requests, expected, strict=True):
            array[:] = request.clone().numpy()  # numpy takes the memory that it is given for good
            assert torch.equal(model(x), answer)  # one product, so that x is the last that was cast


def test_products_into_out_leave_the_copies_as_they_are():
    def scenario():
        model = net()
        w, seen = model[0].weight, []
        with torch.no_grad():
            for _ in range(3):
                out = torch.empty(4, 32)
                seen.append(torch.matmul(X, w.t(), out=out).clone())
                low = torch.empty(4, 32, dtype=LOW)
                torch.mm(X, w.t(), out=low)
                x = torch.eye(16)
                torch.mm(x, X.t(), out=torch.empty(16, 4))
                torch.mm(x, x.clone(), out=x)  # an input that is written
                seen += [low, x, look(model), torch.mm(x, X.t())]
        return seen

    assert_caches_change_nothing(scenario)
