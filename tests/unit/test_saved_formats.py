"""What each format gives back, of which ops the signs are kept, and a torch with which nothing can be packed.

No public call shows a packed tensor: backward unpacks it first. That ops are on the table is asked of torch's own samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

import hmp
from hmp.packing import formats, hooks, packing_of
from hmp.packing.formats import FORMATS, pack, unpack
from hmp.packing.packable import why_not
from saved_oracle import packs
from trap_kit import listable

Tensor = torch.Tensor
TINY, JUMP = 1e-7, 0.01
# Where backwards jump: signs change at zero, hard functions have their corners, and equal numbers are many.
CORNERS = torch.tensor([0, 0, 0.5, -0.5, 1, -1, 3, -3, 6, 20], dtype=torch.float64)


INF, NAN = math.inf, math.nan
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = [(recipe, dtype) for recipe in FORMATS for dtype in FLOATS if dtype in FORMATS[recipe].takes]


def there_and_back(tensor: torch.Tensor, recipe: str) -> torch.Tensor:
    return unpack(pack(tensor, FORMATS[recipe]))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["cpu", "as elsewhere"])
def test_r22_each_number_comes_back_within_its_formats_error(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if elsewhere:  # the way of devices that would have to be waited for: nothing is asked of the numbers
        monkeypatch.setattr(formats, "_is_usual", lambda flat: False)
    for recipe, dtype in PAIRS:
        x = (torch.randn(300_000) * torch.logspace(-3, 3, 300_000)).to(dtype)  # several pieces, and a rest
        y = there_and_back(x, recipe)
        assert y.dtype is dtype and torch.equal(y[-(300_000 % 128) :], x[-(300_000 % 128) :])
        blocks, error = x.double()[:299_904].view(-1, 128), (x.double() - y.double()).abs()[:299_904].view(-1, 128)
        # the rounding to the tensor's own dtype, which the next power of two may begin
        step = torch.finfo(dtype).eps / 2 * blocks.abs().maximum(y.double().abs()[:299_904].view(-1, 128))
        most = {
            "fp8": (blocks.abs() / 16).maximum(blocks.abs().amax(1, keepdim=True) * 2**-16),
            "bf16": blocks.abs() / 256,
            "int8": (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 509 + step,
        }[recipe]
        assert bool((error <= most).all()), (recipe, dtype)
        assert pack(x, FORMATS[recipe]).nbytes <= {"fp8": 1.045, "bf16": 2.001, "int8": 1.08}[recipe] * 300_000


def test_r22_nan_and_inf_come_back_and_what_is_finite_stays_finite() -> None:
    for recipe, dtype in PAIRS:
        most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
        for special in ([INF, -INF, NAN], [INF] * 128, [NAN] * 128, [most, -most], [most] * 128, [0.0] * 128, [least, -least], [-0.0]):
            x = torch.randn(4096 + 5).to(dtype)
            x[: len(special)] = torch.tensor(special, dtype=dtype)
            y = there_and_back(x, recipe)
            odd = ~x.isfinite()
            assert torch.equal(y[odd].nan_to_num(7), x[odd].nan_to_num(7)) and bool(y[~odd].isfinite().all()), (recipe, special)
            plain = x[128:4096]  # the blocks beside it know nothing of it
            assert bool(((y[128:4096] - plain).abs() <= plain.abs() / 16 + 0.02).all()), (recipe, special)


def test_r22_tiny_numbers_are_numbers() -> None:
    x = torch.randn(8192) * 1e-20
    for recipe in ("fp8", "int8"):
        assert (there_and_back(x, recipe) - x).norm() < 0.03 * x.norm()


@pytest.mark.parametrize("recipe", ["fp8", "int8"])
def test_r22_the_error_of_a_number_is_in_proportion_to_its_row(recipe: str) -> None:
    for row in (4, 16, 60, 100, 127, 128, 131, 192, 257, 1000):
        x = torch.randn(8192 // row + 8, row) * torch.logspace(-6, 6, 8192 // row + 8)[:, None]
        error = (unpack(pack(x.flatten(), FORMATS[recipe], row)).view(x.shape) - x).abs()
        assert bool((error <= x.abs().amax(1, keepdim=True) / 16).all()), row
        assert float((error / x.abs().amax(1, keepdim=True)).max()) > 0


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


@pytest.mark.slow
@packs
def test_r22_every_op_that_may_be_listed_and_whose_backward_jumps_has_its_signs_exact() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    found = set()
    for op in op_db:
        name = op.name.removeprefix("nn.functional.").removeprefix("__").removesuffix("__")
        if op.supports_autograd and torch.float64 in op.dtypes and listable(name, "saved") and jumps(op):
            found.add(name)
    found.discard("multi_head_attention_forward")  # its scores are large: what it multiplies is no jump
    assert {name for name in found if not packing_of(name, "int8").signs} == set()
    assert found >= {"abs", "relu", "leaky_relu", "prelu", "selu", "elu", "celu", "softsign"}  # the last three in second derivatives


def test_r22_a_torch_that_does_not_say_whose_hooks_are_in_force_packs_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.7: what a checkpoint keeps would be packed over its head."""
    monkeypatch.setattr(hooks, "saved_tensors_hooks", None)
    gelu = F.gelu
    (tmp_path / "saved.txt").write_text("gelu\n")
    for attempt in (
        lambda: hmp.convert(saved_file_path=tmp_path / "saved.txt"),
        lambda: hmp.apply(nn.Sequential(nn.GELU()), hmp.Policy("packed in a module", saved={"gelu @ 0"})),
        lambda: hmp.casts(hmp.Policy("packed in a region", saved={"gelu"})).__enter__(),
    ):
        with pytest.raises(hmp.HmpError, match=r"whose saved-tensor hooks are active .*; leave out the saved list, or upgrade torch"):
            attempt()
    assert F.gelu is gelu
