"""The check that two sides compute the same: each op in the same dtypes, equally often, and the same loss or output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .sides import Side

# These cast, move or create data, and compute nothing.
_NOT_COMPUTING = frozenset(
    """_to_copy to copy_ clone contiguous _unsafe_view _reshape_alias detach lift_fresh fill_ empty empty_like empty_strided
    zeros zeros_like ones ones_like full full_like new_empty new_empty_strided new_zeros scalar_tensor arange _to_dense
    _local_scalar_dense""".split()
)
Ran = Counter[tuple[str, tuple[str, ...]]]


class Mismatch(Exception):
    """The two sides do not compute the same, so that their times cannot be compared."""


class Recorder(TorchDispatchMode):
    """Counts ATen ops by name and dtypes of their floating-point inputs, without casts, views and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Ran = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        if name not in _NOT_COMPUTING and not is_view:
            leaves = (leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point())
            dtypes = tuple(str(leaf.dtype).removeprefix("torch.") for leaf in leaves)
            if dtypes:
                self.ran[name, dtypes] += 1
        return func(*args, **(kwargs or {}))


def record(side: Side, function: Callable[[], Tensor]) -> Ran:
    """Return the ops that `function` runs on `side`.

    Not in inference_mode, where a dispatch mode sees composite ops whole, and torch.autocast does not cast inside them.
    """
    with side.visit():
        return recorded(side, function)


def recorded(side: Side, function: Callable[[], Tensor]) -> Ran:
    """Return the same inside a visit."""
    with Recorder() as recorder:
        side.run(function)
    return recorder.ran


@dataclass(frozen=True)
class Checked:
    """The ops that two sides have in common, and the distance of their results."""

    ops: int
    apart: float  # the norm of the difference, relative to the norm of the first side's result
    allowed: tuple[str, ...] = ()  # known differences that were found

    def __str__(self) -> str:
        same = "the same bits" if not self.apart else f"{self.apart:.1e} apart"
        return f"{self.ops} ops in the same dtypes, {same}" + "".join(f"; known: {reason}" for reason in self.allowed)


def verify(title: str, function: Callable[[], Tensor], one: Side, other: Side, tolerance: float, known: dict[str, str]) -> Checked:
    """Return the ops of both sides. Raise Mismatch if they differ in more than the ATen ops that `known` excuses.

    The result may differ by `tolerance`, relative: a sum in another order is rounded otherwise.
    """
    ran, other_ran = record(one, function), record(other, function)
    differing = sorted({key for key in ran.keys() | other_ran.keys() if ran[key] != other_ran[key]})
    excused = tuple(dict.fromkeys(known[name] for name, _ in differing if name in known))
    lines = [
        f"{name}({', '.join(dtypes)}): {one.name} {ran[name, dtypes]}, {other.name} {other_ran[name, dtypes]}"
        for name, dtypes in differing
        if name not in known
    ]
    apart = distance(function, one, other)
    if not apart <= tolerance:
        lines.append(f"results {apart:.1e} apart, more than {tolerance:.0e}")
    if lines:
        raise Mismatch(f"{title}: " + "; ".join(lines))
    return Checked(sum(ran.values()), apart, excused)


def distance(function: Callable[[], Tensor], one: Side, other: Side) -> float:
    """Return the distance of the two sides' results, relative to the first one's norm: of a second call, which may use what the first
    one left in a cache. Nothing records meanwhile."""
    results = []
    for side in (one, other):
        with side.visit():
            side.run(function)
            results.append(side.run(function).detach().double())
    return float((results[0] - results[1]).norm() / results[0].norm().clamp_min(1e-30))


def compute_count(side: Side, function: Callable[[], Tensor]) -> int:
    """Return the number of ATen ops that compute something in `function`."""
    return sum(record(side, function).values())


@torch.no_grad()
def same_in_each(case: Any, one: Side, other: Side, tolerance: float, known: dict[str, str]) -> dict[str, Checked]:
    """Verify the three ways in which a model is timed: its loss, its output without gradients, and in inference_mode.

    In inference_mode only the results are compared; the ops are those of no_grad.
    """
    model = case.model
    model.train()
    with torch.enable_grad():
        training = verify(f"{case.title}, training", case.loss, one, other, tolerance, known)
    model.eval()
    no_grad = verify(f"{case.title}, no_grad", case.output, one, other, tolerance, known)
    with torch.inference_mode():
        apart = distance(case.output, one, other)
    if not apart <= tolerance:
        raise Mismatch(f"{case.title}, inference_mode: results {apart:.1e} apart, more than {tolerance:.0e}")
    model.train()
    return {"training": training, "no_grad": no_grad, "inference_mode": Checked(no_grad.ops, apart, no_grad.allowed)}
