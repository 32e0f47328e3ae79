"""The wrapper for `gru.autocast` and the like on a BF16 list: torch.autocast is enabled for the one call of that op.

torch.autocast reaches what the C++ code of an op calls, and patches of Python names do not: it casts the products inside `gru`, and leaves
its gates in float32. No cast of the op's inputs gives the same numbers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import copies
from ..casting import Caster
from ..torch_ops import op_facts
from ..torch_private import is_autocast_available as _is_available
from . import jit_trace, refusals
from .op_rule import Op, OpRule, survey

# torch's own, taken before anything is patched
is_enabled: Callable[[str], bool] = torch.is_autocast_enabled
_enable: Callable[[str, bool], None] = torch.set_autocast_enabled
_get_dtype: Callable[[str], torch.dtype] = torch.get_autocast_dtype
_set_dtype: Callable[[str, torch.dtype], None] = torch.set_autocast_dtype
_is_cached: Callable[[], bool] = torch.is_autocast_cache_enabled
_cache: Callable[[bool], None] = torch.set_autocast_cache_enabled
_nest: Callable[[], int] = torch.autocast_increment_nesting
_unnest: Callable[[], int] = torch.autocast_decrement_nesting
_clear: Callable[[], None] = torch.clear_autocast_cache


class _EntryOfThread(threading.local):
    region: AutocastEntry | None = None  # the innermost context that this thread is in
    make_traced: Callable[[str, torch.dtype], Any] | None = None  # makes contexts while this thread traces for torch.compile


_here = _EntryOfThread()


class AutocastEntry:
    """Context manager that enables torch.autocast for one op. The user's Python that the op calls runs outside of it (`call_outside`).

    torch.autocast's cache of cast weights does not notice writes, and torch empties it where the outermost context ends, which may be one
    of the user's around a whole training loop, for another device or disabled. So it is emptied before the op and after it (R18).
    """

    def __init__(self, device: str, dtype: torch.dtype, cached: bool = True) -> None:
        self._device = device
        self._dtype = dtype
        self._cached = cached  # False: a weight that the op uses many times is cast, and has a gradient, for each (R21)

    def __enter__(self) -> None:
        self._around, _here.region = _here.region, self
        self._before = is_enabled(self._device), _get_dtype(self._device), _is_cached()
        if _nest() > 1:
            _clear()
        self._put(True, self._dtype, self._cached)

    def __exit__(self, *exc_info: object) -> None:
        _unnest()
        _clear()
        self._put(*self._before)
        _here.region = self._around

    def _put(self, enabled: bool, dtype: torch.dtype, cached: bool) -> None:
        _enable(self._device, enabled)
        _set_dtype(self._device, dtype)
        _cache(cached)

    def call_outside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `function` returns under the autocast state from before the context."""
        _here.region = self._around
        self._put(*self._before)
        try:
            return function(*args, **kwargs)
        finally:
            self._put(True, self._dtype, self._cached)
            _here.region = self


def region(device: str, dtype: torch.dtype) -> Any:
    """Return the autocast context for one op. While this thread traces for torch.compile, the graph records it."""
    return (_here.make_traced or AutocastEntry)(device, dtype)


def is_inside() -> bool:
    """Return True if this thread is in a context of `AutocastEntry`.

    An autocast kernel excludes its key, so that `is_enabled` is False in what it calls.
    """
    return _here.region is not None


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, the user's callback such as a saved-tensor hook, run under the autocast state from before the op's context."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        region = _here.region
        return function(*args, **kwargs) if region is None else region.call_outside(function, *args, **kwargs)

    return called


def wrapper(op: Op, inside: Op, unlisted: Op, rule: OpRule, caster: Caster) -> Op:
    """Return `op`, called with torch.autocast enabled; `inside` is what is called there.

    The weights of a recurrent op are given to it in the low-precision dtype by `caster`: torch.autocast would cast those of a cell at each
    call, and sum their gradients in the low-precision dtype (R21). So are the operands of `sparse.mm`: torch.autocast casts them where
    autograd does not see it, and saves for backward what its kernels refuse, unless backward too is called in the context.

    `unlisted`, the wrapper of the op on no list, is called where that raises for a dtype (R7, R11), and on devices that torch.autocast does
    not support. In an autocast context of the user's `op` itself is called (R17).
    """
    is_recurrent, is_cell = rule.op in op_facts.RECURRENT, rule.op in op_facts.CELLS
    is_sparse_product = rule.op == "sparse.mm"

    def with_autocast(*args: Any, **kwargs: Any) -> Any:
        tensors = survey(args, kwargs, rule)
        if not tensors:
            return op(*args, **kwargs)
        device = tensors[0].device.type
        if not _is_available(device):
            return unlisted(*args, **kwargs)
        if is_enabled(device):
            return op(*args, **kwargs)
        make = _here.make_traced or AutocastEntry
        given, named, cached = args, kwargs, True
        if is_recurrent and make is AutocastEntry:
            # where no node that sums in float32 can be made, torch.autocast casts the weights for each step
            cached = is_cell or copies.can_make_nodes()
            given = _with_low_weights(args, rule, caster) if cached else args
        elif is_sparse_product and reaches_sparse(args, kwargs, tensors):
            given, named = (
                tuple(_cast(each, rule.low_dtype, caster) for each in args),
                {k: _cast(v, rule.low_dtype, caster) for k, v in kwargs.items()},
            )
        try:
            with make(device, rule.low_dtype) if cached else AutocastEntry(device, rule.low_dtype, cached=False):
                return inside(*given, **named)
        except RuntimeError as error:
            if unlisted is op or not refusals.may_run_again(error, tensors):
                raise
            jit_trace.resume()
        return unlisted(*args, **kwargs)

    return with_autocast


def reaches_sparse(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> bool:
    """Return True if torch.autocast reaches a call of sparse.mm: not one with `reduce=` nor of two sparse matrices."""
    return len(args) + len(kwargs) == 2 and any(each.layout is torch.strided for each in tensors)


def _with_low_weights(args: tuple[Any, ...], rule: OpRule, caster: Caster) -> tuple[Any, ...]:
    """Return the positional arguments of a recurrent op with its weights cast: all after a cell's state, the last list of other ops."""
    if rule.op in op_facts.CELLS:
        return *args[:2], *(_cast(each, rule.low_dtype, caster) for each in args[2:])
    at = max((i for i, each in enumerate(args) if isinstance(each, (list, tuple))), default=None)
    if at is None:
        return args
    return *args[:at], [_cast(each, rule.low_dtype, caster) for each in args[at]], *args[at + 1 :]


def _cast(value: Any, dtype: torch.dtype, caster: Caster) -> Any:
    return caster(value, dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value


class Traced:
    """Context manager inside which this thread makes its contexts by `make(device, dtype)`: torch.compile records them in its graph."""

    def __init__(self, make: Callable[[str, torch.dtype], Any]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._before, _here.make_traced = _here.make_traced, self._make

    def __exit__(self, *exc_info: object) -> None:
        _here.make_traced = self._before
