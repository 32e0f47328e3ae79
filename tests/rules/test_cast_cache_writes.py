"""However a module or its weights are written, by an optimizer too, the next product sees what was written.

What a tensor is written by alone, tests/properties/test_p3_caches.py has; here a module is written, or its weights get another memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hmp
from cast_cache_kit import LOW, X, assert_caches_change_nothing, assert_same_bits, caches, each, grads, look, loss, net, params
from low_kernels_kit import as_computed


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


def _swapped_on_conversion(model):
    model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().float()
        model.load_state_dict(_half(model.state_dict()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _average_and_back(model):
    """As an evaluation of averaged weights does."""
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    backup = params(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
        average.update_parameters(model)
        for values in (params(average.module), backup, params(average.module)):
            for p, value in zip(model.parameters(), values, strict=True):
                p.data.copy_(value)
            look(model)


WRITES = {
    "p.set_": _taken_and_dropped(torch.no_grad()(lambda p: p.set_(p.detach() * 0.5))),
    "vector_to_parameters": lambda m: vector_to_parameters(parameters_to_vector(m.parameters()).detach() * 0.5, m.parameters()),
    "a flat buffer": _flat_buffer,
    "load_state_dict": lambda m: m.load_state_dict(_half(m.state_dict())),
    "load_state_dict assign": lambda m: m.load_state_dict(_half(m.state_dict()), assign=True),
    "weight = Parameter": lambda m: setattr(m[0], "weight", torch.nn.Parameter(m[0].weight.detach() * 0.5)),
    "prune": lambda m: torch.nn.utils.prune.remove(torch.nn.utils.prune.l1_unstructured(m[0], "weight", 0.5), "weight"),
    "_apply": lambda m: m._apply(lambda t: t * 0.5),
    "share_memory": lambda m: (m.share_memory(), look(m), [p.data.mul_(0.5) for p in m.parameters()]),
    "to float64 and back": lambda m: (m.double(), look(m, X.double()), [p.data.mul_(0.5) for p in m.parameters()], m.float()),
    "swapped on conversion": _swapped_on_conversion,
    "an average and back": _average_and_back,
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
            assert len(seen) > 2 or name in ("to bfloat16 and back", "an average and back") or not torch.equal(before, after)
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
    assert_same_bits([got], [_by_hand(model, X).detach()])


def test_a_written_weight_is_cast_anew():
    each(WRITES, _check_weight_write)


def _by_hand(model, x):
    """The model in plain torch, with the casts written out at each use."""
    with hmp.disable_casts():
        for layer in model:
            given = (x, getattr(layer, "weight", None), getattr(layer, "bias", None))
            x = torch.relu(x) if given[1] is None else as_computed(F.linear)(*(t.to(LOW) for t in given))
        return x.float()


# --- optimizers. SparseAdam takes sparse gradients alone, which no product with a cast weight gives; LBFGS takes a closure.


def test_a_graph_held_over_fused_steps_keeps_its_own_numbers():
    def scenario():
        model, held = net(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        for _ in range(3):
            held.append(model(X))
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        held[-1].float().sum().backward()  # what was saved for it is of the last step but one
        return held, params(model), grads(model)

    assert_caches_change_nothing(scenario, hits=False)
