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


def _swap(p):
    torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach() * 0.5))


def _by_numpy(array):
    array *= 0.5


# What a tensor is written by alone, tests/properties/test_p3_caches.py has; these write a module, or give its weights another memory.
WRITES = {
    "p.data = twice": _taken_and_dropped(lambda p: (setattr(p, "data", p.data * 0.5), setattr(p, "data", p.data * 0.5))),
    "p.set_": _taken_and_dropped(torch.no_grad()(lambda p: p.set_(p.detach() * 0.5))),
    "a view in inference_mode": _taken_and_dropped(torch.inference_mode()(lambda p: p.view(-1)[:3].mul_(0.5))),
    "p.numpy(force=True)": _taken_and_dropped(lambda p: _by_numpy(p.numpy(force=True))),
    "np.asarray": _taken_and_dropped(lambda p: _by_numpy(np.asarray(p.detach()))),
    "swap_tensors": _taken_and_dropped(_swap),
    "vector_to_parameters": lambda m: vector_to_parameters(parameters_to_vector(m.parameters()).detach() * 0.5, m.parameters()),
    "a flat buffer": _flat_buffer,
    "load_state_dict": lambda m: m.load_state_dict(_half(m.state_dict())),
    "load_state_dict assign": lambda m: m.load_state_dict(_half(m.state_dict()), assign=True),
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


def test_a_parameter_in_numpys_memory_is_never_kept():
    array = np.ones((8, 16), dtype=np.float32)
    with caches(True), torch.no_grad():
        weight = torch.nn.Parameter(torch.from_numpy(array))
        for value in (1, 2, 3):
            array[:] = value
            for _ in range(2):
                assert torch.equal(torch.nn.functional.linear(torch.ones(1, 16), weight).float(), torch.full((1, 8), 16.0 * value))
        assert hmp.cache_info().entries == 0


@pytest.mark.sampled(2)
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
