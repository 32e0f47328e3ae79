"""`gru.autocast` on a list: torch.autocast decides inside that op, as it would by itself.

torch.autocast reaches what the C++ code of an op calls, which a patch of Python names does not: the products inside `gru`, with its gates
left in float32. No cast of the op's inputs gives the same numbers. So for the time of that one call torch.autocast is really enabled.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..torch_private import is_autocast_available as _is_available
from . import jit_trace, refusals
from .op_rule import Op, OpRule, survey

# torch's own, taken before anything is patched
_is_enabled: Callable[[str], bool] = torch.is_autocast_enabled
_enable: Callable[[str, bool], None] = torch.set_autocast_enabled
_get_dtype: Callable[[str], torch.dtype] = torch.get_autocast_dtype
_set_dtype: Callable[[str, torch.dtype], None] = torch.set_autocast_dtype
_is_cached: Callable[[], bool] = torch.is_autocast_cache_enabled
_cache: Callable[[bool], None] = torch.set_autocast_cache_enabled
_nest: Callable[[], int] = torch.autocast_increment_nesting
_unnest: Callable[[], int] = torch.autocast_decrement_nesting
_clear: Callable[[], None] = torch.clear_autocast_cache


class _Here(threading.local):
    region: Region | None = None  # the one that this thread is in
    traced: Callable[[str, torch.dtype], Any] | None = None  # makes a region in the code that torch.compile traces here


_here = _Here()


class Region:
    """torch.autocast, really enabled, for one op; what the op calls of the user's Python is outside of it."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def __enter__(self) -> None:
        self._around, _here.region = _here.region, self
        self._before = _is_enabled(self._device), _get_dtype(self._device), _is_cached()
        _nest()
        self._put(True, self._dtype, True)

    def __exit__(self, *exc_info: object) -> None:
        if _unnest() == 0:
            _clear()
        self._put(*self._before)
        _here.region = self._around

    def _put(self, enabled: bool, dtype: torch.dtype, cached: bool) -> None:
        _enable(self._device, enabled)
        _set_dtype(self._device, dtype)
        _cache(cached)

    def call_outside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `function` returns when it is called as if the region were not there."""
        _here.region = self._around
        self._put(*self._before)
        try:
            return function(*args, **kwargs)
        finally:
            self._put(True, self._dtype, True)
            _here.region = self


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, the user's Python that an op calls, as it would run without a region."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        region = _here.region
        return function(*args, **kwargs) if region is None else region.call_outside(function, *args, **kwargs)

    return called


def wrapper(op: Op, unlisted: Op, rule: OpRule) -> Op:
    """`op`, in which torch.autocast decides; `unlisted` for what it refuses (R7, R11), and for a device that it does not know.

    Where torch.autocast is enabled already the op is left to that (R17).
    """
    # a scalar beyond the low dtype saturates here too (R12)
    inside = unlisted if rule.unlisted is not None and rule.unlisted.kind in ("fill", "guard") else op

    def decided(*args: Any, **kwargs: Any) -> Any:
        tensors = survey(args, kwargs, rule)
        if not tensors:
            return op(*args, **kwargs)
        device = tensors[0].device.type
        if not _is_available(device):
            return unlisted(*args, **kwargs)
        if _is_enabled(device):
            return op(*args, **kwargs)
        make = _here.traced or Region
        try:
            with make(device, rule.low):
                return inside(*args, **kwargs)
        except RuntimeError as error:
            if unlisted is op or not refusals.is_of_a_dtype(error) or refusals.users_python_sees(tensors):
                raise
            jit_trace.resume()
        return unlisted(*args, **kwargs)

    return decided


class Traced:
    """Makes regions by `make` in this thread: for code that is traced, where a region must stand in the trace."""

    def __init__(self, make: Callable[[str, torch.dtype], Any]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._before, _here.traced = _here.traced, self._make

    def __exit__(self, *exc_info: object) -> None:
        _here.traced = self._before
