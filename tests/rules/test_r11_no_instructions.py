"""R11, "No instructions": a product computes in float32 on its rounded inputs and is rounded, in backward too, and loses nothing by it.

The oracle is plain torch with the casts written out: `op(x.to(low).float(), ...).to(low)`.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

import hmp
from no_instructions_kit import (
    AGAIN,
    Call,
    all_same,
    by_hand,
    convolution,
    end_of,
    expected_of,
    gradients,
    linear,
    listed,
    random,
    recurrent,
    weights_of,
)
from oracle import BF16, F16, F32, kept_for_backward
from trap_kit import same

pytestmark = pytest.mark.usefixtures("no_instructions")


# --- every op, every spelling


def test_r11_float16_overflows_to_infinity_where_it_is_rounded() -> None:
    x = torch.full((4, 64), 60.0)
    with hmp.casts(listed(F16)):
        large, small = torch.mm(x, 1000 * x[0, 0] * torch.ones(64, 4)), torch.mm(x, torch.ones(64, 4))
    assert large.dtype is F16 and bool(large.isposinf().all())
    same(small, torch.full((4, 4), 3840.0, dtype=F16))


# --- gradients


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_r11_what_is_large_has_the_same_gradients_each_time(dtype: torch.dtype) -> None:
    """retain_graph, create_graph, a second backward, and gradients of one input at a time."""
    for name, (call, make) in AGAIN.items():
        args = make(dtype)
        end, wanted = expected_of(name, args)
        with hmp.casts(listed()):
            found = call(*args)
        same(found, end)
        for _ in range(2):
            all_same(gradients(found, args, retain_graph=True), wanted)
        for arg, each in zip(args, wanted, strict=True):
            all_same(gradients(found, [arg], retain_graph=True), [each])
        # not without: torch's LSTM has other last bits there. Of its kernel for attention without dropout it has no second derivative
        graph = {"retain_graph": True, "create_graph": name != "attention"}
        all_same(gradients(found, args, **graph), gradients(end_of(name, args), args, **graph))
        all_same(gradients(found, args), wanted)
        with pytest.raises(RuntimeError, match="second time"):
            gradients(found, args)


def test_r11_a_forward_that_trains_has_the_bits_of_one_that_trains() -> None:
    """oneDNN has another LSTM for inference, whose last bits differ."""
    args = [random(16, 8, 64), *weights_of(4, 64, 1, F32)]
    call = recurrent("lstm")
    for of_no_grad in (False, True):
        with torch.set_grad_enabled(not of_no_grad):
            expected = by_hand(call)(*args)
            with hmp.casts(listed()):
                same(call(*args), expected)


def test_r11_weights_of_many_steps_used_again_have_the_gradients_of_one_sum() -> None:
    """The gradients of the steps are added up in float32 and rounded once, also of a large weight whose copy in float32 is shared."""
    layer, x = torch.nn.GRU(96, 96), random(20, 4, 96)
    of = [x, *layer.parameters()]
    rounded = {n: p.to(BF16).float() for n, p in layer.named_parameters()}
    expected = torch.func.functional_call(layer, rounded, (x.to(BF16).float(),))[0].to(BF16)
    wanted = gradients(expected, of)
    for _ in range(3):
        with hmp.casts(listed()):
            found = layer(x)[0]
        same(found, expected)
        all_same(gradients(found, of), wanted)


def test_r11_out_takes_no_part_in_autograd_as_in_torch() -> None:
    for grad, lists in itertools.product((False, True), (hmp.Policy("none"), listed())):
        x, out = random(4, 4, dtype=BF16, grad=grad), torch.zeros(4, 4, dtype=BF16)
        with hmp.casts(lists), pytest.raises(RuntimeError, match="automatic differentiation") if grad else contextlib.nullcontext():
            torch.mm(x, x, out=out)
        same(out, torch.zeros(4, 4, dtype=BF16) if grad else by_hand(torch.mm)(x, x))


def test_r11_a_view_stays_a_view() -> None:
    """An einsum of one tensor multiplies nothing."""
    x = random(4, 5, dtype=BF16, grad=False)
    with hmp.casts(listed()):
        found = torch.einsum("ij->ji", x)
        found[0, 0] = 7
    assert found._base is x and float(x[0, 0]) == 7


@pytest.mark.parametrize("frozen", ["all but the first", "all but the last"])
def test_r11_frozen_inputs_change_no_gradient(frozen: str) -> None:
    for name, (call, make) in AGAIN.items():
        args = make(F32)
        at = 0 if frozen == "all but the first" else len(args) - 1
        for i, each in enumerate(args):
            each.requires_grad_(i == at)
        end, wanted = expected_of(name, args)
        with hmp.casts(listed()):
            found = call(*args)
        same(found, end)
        all_same(gradients(found, [args[at]]), wanted)


# --- writes between forward and backward


def test_r11_a_write_before_backward_changes_no_gradient() -> None:
    """The op saves its inputs in float32, and not the tensors that the program writes."""
    for name, (call, make) in AGAIN.items():
        for at in range(len(make(BF16))):
            args = make(BF16)
            wanted = expected_of(name, args)[1]
            with hmp.casts(listed()):
                end = call(*args)
            with torch.no_grad():
                args[at].mul_(2)
            all_same(gradients(end, args), wanted)


# --- memory


def kept_by_hooks(call: Call, args: list[torch.Tensor]) -> int:
    return kept_for_backward(lambda: call(*args), besides=args)[0]


BY_HOOKS = {
    "linear": (linear, [(4, 64, 64), (64, 64), (64,)]),
    "heads": (AGAIN["heads"][0], [(2, 40, 4, 32)] * 2),
    "conv2d": (convolution, [(4, 8, 16, 16), (8, 8, 3, 3), (8,)]),
}


def test_r11_at_most_twice_torch_autocasts_bytes_are_kept_for_backward() -> None:
    """Inputs in float32: four bytes a number for two."""
    for name, (call, shapes) in BY_HOOKS.items():
        args = [random(*shape, seed=i, scale=0.2) for i, shape in enumerate(shapes)]
        with torch.autocast("cpu", cache_enabled=False):
            autocast = kept_by_hooks(call, args)
        with hmp.casts(listed()):
            ours = kept_by_hooks(call, args)
        assert 0 < ours <= 2 * autocast, name
