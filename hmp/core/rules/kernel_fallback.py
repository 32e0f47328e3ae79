"""An op runs in float32 if the device has no low-precision kernel for it, by torch's known lacks or after a failed call."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import casting, locks
from ..casting import Tensor, dtype_name
from ..log import log, should_log
from ..ops import sites, table
from ..patching import patches
from ..torch_private import in_no_transform
from . import refusals
from .op_rule import OpRule

LOW = frozenset({torch.bfloat16, torch.float16})
# Returned in place of a result: the caller is to raise the error that it caught, unchanged.
GIVEN_UP = object()
_MOST_FAILED = 256  # signatures remembered for each op: arguments that vary without end must not fill the memory

_lock = locks.RLock()
_counts: Counter[str] = Counter()


def fallbacks() -> dict[str, int]:
    """Count the calls that ran in another dtype than their list says, because a kernel is missing.

    Returns:
        The number of calls by op: those that ran in float32 because the device has no low-precision kernel. "op: not ..., reason": those
        that did not do what a list of another kind than BF16, FP32 and promote asks for, such as "not in FP8" or "not packed". The counts
        are reset when hmp's patches of torch are removed.

    Example:
        >>> hmp.fallbacks()
        {}
    """
    with _lock:
        return dict(_counts)


def fallbacks_of(op: str) -> int:
    """Return how many calls of the op ran in float32, as `fallbacks()` has them."""
    return _counts[op]


def count(op: str, what: str, reason: str) -> bool:
    """Count a call of an op that did not run as a list says, which `what` names, for `fallbacks()`.

    Return True for the first one with that reason, to be logged.
    """
    return _count(f"{op}: {what}, {reason}") and should_log()


def _count(what: str) -> bool:
    """Count `what`; whether it is the first time."""
    with _lock:
        if not _counts:
            patches.on_restore(_counts.clear)
        _counts[what] += 1
        return _counts[what] == 1


class Kernels:
    """For which calls an op has no kernel in a low-precision dtype. `failed` has the signatures of calls that raised for want of one.

    `may_lack`: calls may be known to have none, so that each must be looked at.
    """

    def __init__(self, rule: OpRule) -> None:
        self._op = rule.op
        line = () if rule.facts.users else sites.ancestry(rule.op)
        self._known = known(line)
        self._no_backward = known(line, backward=True)
        self.may_lack = bool(self._known or self._no_backward) and rule.dtype is not torch.float32
        self._retries = rule.facts.retries
        self.failed: dict[Any, None] = {}

    def lacks(self, tensors: list[Tensor], dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True if the call is known to have no kernel in `dtype` on the device of `tensors`.

        Such a call is counted for `fallbacks()`, and the op's first one logged.
        """
        if dtype not in LOW:
            return False
        device = tensors[0].device.type
        found = (device, dtype) in self._known or ("*", dtype) in self._known
        if not found and (device, dtype) in self._no_backward:
            found = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if not found and self.failed:
            found = _signature(tensors, dtype, args, kwargs) in self.failed
        if found:
            self._note(device, dtype)
        return found

    def lacks_in_place(self, tensor: Tensor) -> bool:
        """Return True if an op that writes into `tensor` is known to have no kernel in its dtype."""
        return bool(self._known) and self.lacks([tensor], tensor.dtype, (), {})

    def retry(
        self,
        error: RuntimeError,
        tensors: list[Tensor] | None,
        dtype: torch.dtype,
        mixed_dtype: torch.dtype | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        run: Callable[[torch.dtype], Any],
    ) -> Any:
        """Return the result of `run(torch.float32)` after the op raised `error` in `dtype`.

        If its inputs may have been a mixture of dtypes, as a tensor and its tangent in forward-mode differentiation, and `error` is about
        one: that of `run(mixed_dtype)`. GIVEN_UP if the op may not run again, or raises again: random ops, ops that write into their
        inputs, and where the user's Python saw the call.

        After a success in float32, calls with the same devices, layouts, dimensions and other arguments do not try the low-precision dtype
        again. In a function transform or forward-mode differentiation nothing is remembered.
        """
        if not tensors or not self._retries or dtype not in LOW or not refusals.may_run_again(error, tensors):
            return GIVEN_UP
        is_mixture = mixed_dtype is not None and refusals.is_mixture(error)
        try:
            result = run(mixed_dtype if mixed_dtype is not None and is_mixture else torch.float32)
        except RuntimeError as second:
            if not refusals.is_torchs_own(second):
                raise
            return GIVEN_UP
        if not is_mixture:
            if in_no_transform():
                self._remember(_signature(tensors, dtype, args, kwargs))
            self._note(tensors[0].device.type, dtype)
        return result

    def _remember(self, signature: Any) -> None:
        if not self.failed:
            patches.on_restore(self.failed.clear)  # a wrapper may be called again after revert() and convert()
        if len(self.failed) >= _MOST_FAILED:
            self.failed.clear()
        self.failed[signature] = None

    def _note(self, device: str, dtype: torch.dtype) -> None:
        if _count(self._op) and should_log():
            log.warning(
                "%s has no %s kernel on %s: it runs in float32 and returns float32 (see rule R11); hmp.fallbacks() counts such calls",
                self._op, dtype_name(dtype), device,
            )  # fmt: skip


@functools.cache
def known(names: tuple[str, ...], *, backward: bool = False) -> frozenset[tuple[str, torch.dtype]]:
    """Return the pairs (device type or "*", dtype) for which an op has no kernel; with `backward`, none for its backward alone.

    `names` are the op's id and the ids of the ops whose entries it follows.
    """
    without = _without(backward)
    return frozenset().union(*[without[name] for name in names if name in without])


@functools.cache
def _without(backward: bool) -> dict[str, set[tuple[str, torch.dtype]]]:
    """Return the id of an op → the pairs (device type or "*", dtype) for which it has no kernel, or none for its backward."""
    found: dict[str, set[tuple[str, torch.dtype]]] = {}
    for device, dtypes, names in table.NO_BACKWARD_KERNEL if backward else table.NO_KERNEL:
        for name in names:
            found.setdefault(name, set()).update((device, getattr(torch, dtype)) for dtype in dtypes.split())
    return found


def _signature(tensors: list[Tensor], dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a hashable key of what the choice of a kernel depends on.

    These are device types, layouts, dimensions (`linalg.norm` of a matrix is another kernel than that of a vector), the low-precision dtype
    and all non-tensor arguments.
    """
    others = casting.map_tensors((args, dict(kwargs)), lambda tensor: None)  # type: ignore[arg-type, return-value]
    return dtype, repr(others), *((t.device.type, t.layout, t.dim()) for t in tensors)
