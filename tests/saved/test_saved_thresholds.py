"""What a backward compares comes back exactly: signs, zeros, thresholds. Which ops do so is asked of torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

import hmp
from hmp.saved import how_of
from hmp.saved.packable import why_not
from saved_oracle import bytes_of, packs

Tensor = torch.Tensor
TINY, JUMP = 1e-7, 0.01
# Where backwards jump: signs change at zero, hard functions have their corners, and equal numbers are many.
CORNERS = torch.tensor([0, 0, 0.5, -0.5, 1, -1, 3, -3, 6, 20], dtype=torch.float64)


# --- the table, from torch ----------------------------------------------------------------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def gradients(call: Callable[[], Any], leaves: list[Tensor], moved: bool, twice: bool) -> list[Tensor]:
    """First or second derivatives, where what is kept is moved by less than it is rounded, each number up or down."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(7)

    def unpack(kept: Tensor) -> Tensor:
        if not moved or kept.dtype is not torch.float64:
            return kept
        side = torch.randint(0, 2, kept.shape, generator=generator) * 2 - 1
        return kept + side * TINY * kept.detach().abs().nan_to_num(1, 1, 1).clamp(min=1)

    def summed(values: list[Tensor]) -> Tensor:
        weights = torch.Generator().manual_seed(3)
        return sum(((value * torch.rand(value.shape, dtype=value.dtype, generator=weights)).sum() for value in values), torch.zeros(()))

    with saved_tensors_hooks(lambda kept: kept if kept.is_leaf else kept.detach(), unpack):
        found = summed([each for each in tensors(call()) if each.requires_grad])
        if not found.requires_grad:
            return []
        first = torch.autograd.grad(found, leaves, allow_unused=True, create_graph=twice)
        if not twice:
            return list(filter(lambda each: each is not None, first))
        found = summed([each for each in first if each is not None and each.requires_grad])
        second = torch.autograd.grad(found, leaves, allow_unused=True) if found.requires_grad else []
    return [each for each in second if each is not None]


def jump(call: Callable[[], Any], leaves: list[Tensor], twice: bool) -> float:
    """How much of a gradient, at most, a tiny change of what is kept changes."""
    exact, moved = (gradients(call, leaves, move, twice) for move in (False, True))
    apart = [((a - b).abs() / a.abs().clamp(min=1))[a.isfinite()].nan_to_num(1) for a, b in zip(exact, moved, strict=True)]
    return max([float(each.max()) for each in apart if each.numel()], default=0.0)


def jumps(op: Any) -> bool:
    """Whether a derivative of the op jumps for one of torch's own samples, with numbers that lie at corners."""
    for sample in itertools.islice(op.sample_inputs_func(op, "cpu", torch.float64, True), 12):
        args = (sample.input, *sample.args)
        generator = torch.Generator().manual_seed(1)
        given = [each for each in tensors((args, sample.kwargs)) if each.is_leaf and each.requires_grad]
        leaves = [each for each in given if each.dtype is torch.float64 and each.layout is torch.strided]
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(CORNERS[torch.randint(len(CORNERS), leaf.shape, generator=generator)])
        if not leaves or why_not(op.name, args, sample.kwargs):
            continue
        for twice in (False, True):
            try:
                if jump(lambda args=args, kwargs=sample.kwargs: op(*args, **kwargs), leaves, twice) > JUMP:
                    return True
            except RuntimeError:  # no numbers for this op, or it has no second derivative
                continue
    return False


def may_be_listed(name: str) -> bool:
    try:
        hmp.Policy(saved={name})
    except hmp.HmpError:
        return False
    return True


@pytest.mark.slow
@packs
def test_r22_every_op_that_may_be_listed_and_whose_backward_jumps_has_its_signs_exact() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    found = set()
    for op in op_db:
        name = op.name.removeprefix("nn.functional.").removeprefix("__").removesuffix("__")
        if op.supports_autograd and torch.float64 in op.dtypes and may_be_listed(name) and jumps(op):
            found.add(name)
    found.discard("multi_head_attention_forward")  # its scores are large: what it multiplies is no jump
    assert {name for name in found if not how_of(name, "int8").signs} == set()
    assert found >= {"abs", "relu", "leaky_relu", "prelu", "selu", "elu", "celu", "softsign"}  # the last three in second derivatives


# --- the numbers --------------------------------------------------------------------------------------------------------------------------

ASK_FOR_SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "leaky_relu in place": lambda x: F.leaky_relu_(x + 0, 0.1),
    "elu": lambda x: F.elu(x, 2.0),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 3.0),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype)),
    "max_pool": lambda x: F.max_pool1d(x, 4),
}
# whose numbers are compared with others than zero, or with each other
COMPARE = {
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "threshold": lambda x: F.threshold(x, 0.5, 0.0),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "clamp": lambda x: x.clamp(-1, 1),
    "maximum": lambda x: torch.maximum(x, x.roll(1, 0)),
    "amax": lambda x: x.round().amax(1),
    "cummax": lambda x: x.cummax(1)[0],
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach().roll(1, 0)),
}


def with_outliers(dtype: torch.dtype) -> Tensor:
    """Rows with one large number, numbers of all magnitudes beside it, zeros of both signs."""
    torch.manual_seed(0)
    x = torch.randn(64, 256) * torch.logspace(-12, 0, 256)
    x[:, 0], x[:, 7], x[:, 100] = 1000.0, 0.0, -0.0
    return x.to(dtype)


def gradient(call: Callable[[Tensor], Tensor], x: Tensor, policy: hmp.Policy | None) -> Tensor:
    leaf = x.clone().requires_grad_()
    with hmp.casts(policy) if policy is not None else torch.enable_grad():
        result = call(leaf * 1.0)
        F.gelu(torch.ones(8))  # packs what nobody holds
    return torch.autograd.grad(result.float().sum(), leaf)[0]


@packs
@pytest.mark.parametrize("recipe", ["fp8", "bf16", "int8"])
def test_r22_no_gradient_is_on_the_wrong_side_of_zero(recipe: str) -> None:
    policy = hmp.Policy("everything", saved={"*"}, saved_recipe=recipe)
    for name, call in ASK_FOR_SIGNS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = with_outliers(dtype)
            exact, found = (gradient(call, x, each) for each in (None, policy))
            if "elu" in name.replace("relu", ""):  # the exponential of a number that is rounded by a sixteenth
                assert bool(((found - exact).abs() <= 0.13 + exact.abs() / 16).all()), (name, dtype)
            else:
                assert torch.equal(found, exact), (name, dtype)


@packs
def test_r22_what_is_compared_with_a_threshold_or_another_number_is_kept_as_it_is() -> None:
    x, policy = with_outliers(torch.float32), hmp.Policy("everything", saved={"*"}, saved_recipe="int8")
    for name, call in COMPARE.items():
        exact, found = (gradient(call, x, each) for each in (None, policy))
        assert torch.equal(found, exact), name


@packs
def test_r22_a_dropouts_mask_is_kept_as_bits_and_exact() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    for drop in (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout):
        found = []
        for policy in (hmp.Policy("nothing"), hmp.Policy("everything", saved={"*"}, saved_recipe="fp8")):
            torch.manual_seed(0)
            with hmp.casts(policy):
                y = drop(x * 1.0, 0.1, True)
                F.gelu(torch.ones(8))
            found.append(torch.autograd.grad(y.sum(), x)[0])
        assert torch.equal(*found)
    with hmp.casts(hmp.Policy("everything", saved={"*"})):
        kept, _ = bytes_of(lambda: (F.dropout(x * 1.0, 0.1), F.gelu(torch.ones(8)))[0])
    assert kept == 64 * 256 // 8 + 4


@packs
def test_r22_nan_and_inf_pass_where_torch_lets_them_pass() -> None:
    x = torch.randn(64, 128)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    for name in ("abs", "relu", "leaky_relu"):
        exact, found = (gradient(ASK_FOR_SIGNS[name], x, each) for each in (None, hmp.Policy("everything", saved={"*"})))
        assert torch.equal(found, exact), name
