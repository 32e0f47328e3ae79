"""R11: where a device has no kernel for an op in a low dtype the op runs in float32. What is known of that, and what failing taught."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import fork_safe
from ..casting import Tensor
from ..formatting import dtype_name
from ..observing import log, speaks
from ..ops import op_facts
from ..patching import patches
from . import jit_trace, refusals
from .op_rule import OpRule

LOW = frozenset({torch.bfloat16, torch.float16})
# In the place of a result: the error that was caught is to be raised, as it is.
GIVEN_UP = object()
_REMEMBERED = 256  # argument lists an op; one that varies without end must not fill the memory

_lock = fork_safe.RLock()
_counts: Counter[str] = Counter()


def fallbacks() -> dict[str, int]:
    """How many calls of each op ran in float32 because the device has no kernel in the low dtype, since torch was last untouched."""
    with _lock:
        return dict(_counts)


class Kernels:
    """Which low dtypes one op has kernels for; `failed` holds the calls that had none."""

    def __init__(self, rule: OpRule) -> None:
        self._op = rule.op
        self._known = rule.no_kernel
        self._no_backward = rule.no_backward_kernel
        self._retries = rule.retries
        self.failed: dict[Any, None] = {}

    def lacks(
        self, tensors: list[Tensor], dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, counted: bool = True
    ) -> bool:
        """Whether the call is known to have no kernel in `dtype` where `tensors` are; such a call is counted and logged, once, by whoever
        then runs it in float32."""
        if dtype not in LOW:
            return False
        device = tensors[0].device.type
        found = (device, dtype) in self._known or ("*", dtype) in self._known
        if not found and (device, dtype) in self._no_backward:
            found = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if not found and self.failed:
            found = _signature(tensors, dtype, args, kwargs) in self.failed
        if found and counted:
            self._note(device, dtype)
        return found

    def lacks_in_place(self, tensor: Tensor, *, counted: bool = True) -> bool:
        """Whether an op that writes into `tensor` is known to have no kernel in its dtype."""
        return bool(self._known) and self.lacks([tensor], tensor.dtype, (), {}, counted=counted)

    def retry(
        self,
        error: RuntimeError,
        tensors: list[Tensor] | None,
        dtype: torch.dtype,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        run: Callable[[torch.dtype], Any],
    ) -> Any:
        """What the op gives in float32 after torch refused `dtype`; GIVEN_UP where `error` is no such refusal, or float32 no remedy.

        Remembered where float32 succeeds: the next call with the same devices, layouts and other arguments does not try the low dtype.
        Never for random ops and for what writes into its inputs, which are half done by now, nor where saved-tensor hooks were called.
        """
        if not tensors or not self._retries or dtype not in LOW or not refusals.is_of_a_dtype(error):
            return GIVEN_UP
        jit_trace.resume()
        if refusals.hooks_see(tensors) and refusals.saves_first(functools.partial(run, dtype)):
            return GIVEN_UP
        try:
            result = run(torch.float32)
        except RuntimeError as second:
            if not refusals.is_torchs_own(second):
                raise
            jit_trace.resume()
            return GIVEN_UP
        if not self.failed:
            patches.on_restore(self.failed.clear)  # wrappers outlive revert()
        if len(self.failed) >= _REMEMBERED:
            self.failed.clear()
        self.failed[_signature(tensors, dtype, args, kwargs)] = None
        self._note(tensors[0].device.type, dtype)
        return result

    def _note(self, device: str, dtype: torch.dtype) -> None:
        with _lock:
            if not _counts:
                patches.on_restore(_counts.clear)
            _counts[self._op] += 1
            first = _counts[self._op] == 1
        if first and speaks():
            log.warning(
                "%s cannot run in %s on %s: it runs in float32, and its result stays so (R11); hmp.fallbacks() counts such calls",
                self._op, dtype_name(dtype), device,
            )  # fmt: skip


@functools.cache
def known(names: tuple[str, ...], *, backward: bool = False) -> frozenset[tuple[str, torch.dtype]]:
    """The (device type or "*", dtype) that an op, given by its name and those that it follows, is known to have no kernel for;
    with `backward`, those for which only its backward has none."""
    table = op_facts.NO_BACKWARD_KERNEL if backward else op_facts.NO_KERNEL
    return frozenset(
        (device, getattr(torch, dtype)) for device, dtypes, without in table for dtype in dtypes.split() if not without.isdisjoint(names)
    )


def _signature(tensors: list[Tensor], dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Device types, layouts, the low dtype and all that is no tensor: what the choice of a kernel depends on."""
    places = tuple((t.device.type, t.layout) for t in tensors)
    return places, dtype, tuple(map(_plain, args)), tuple((name, _plain(kwargs[name])) for name in sorted(kwargs))


def _plain(value: Any) -> Any:
    """A hashable stand-in for an argument: a tensor's is its kind alone."""
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (type(value), value)
