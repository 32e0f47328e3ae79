"""What a wrapper reports to listeners: that an op begins and ends, its casts, its dtypes and its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_private
from ..casting import Caster, Tensor, castable, dtype_name, each_castable
from ..copies import saved_here
from ..observe import Call, Clock, Listener, asked_dtype, dtypes_of, end_all, first_dtype, hear_aten, here, nbytes_of, noting
from ..ops import table
from ..torch_private import function_mode_at, function_modes
from .emulation import replaces_autocast
from .op import Op, OpUnderRule

_MOST_KERNELS = 4096
# They move values or make none: what they get says nothing of the dtype that an op computes in.
_MOVES = frozenset("_to_copy clone copy_ cat stack empty_like zeros_like ones_like new_empty new_zeros _unsafe_view".split())
_compiling = torch.compiler.is_compiling


def counted(caster: Caster, clock: Clock, listeners: Sequence[Listener]) -> Caster:
    """Return `caster`, whose casts are noted in the call that makes them."""
    lists = any(each.lists_casts for each in listeners)

    def counting(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        call = here.call
        if call is None or tensor.dtype is dtype:
            return caster(tensor, dtype)
        saved = saved_here()
        started = clock()
        if torch_private.is_profiled():
            with torch.profiler.record_function(f"hmp::cast {dtype_name(tensor.dtype)} to {dtype_name(dtype)}"):
                copy = caster(tensor, dtype)
        else:
            copy = caster(tensor, dtype)
        call.cast_seconds += clock() - started
        if lists:
            call.cast_dtypes += ((tensor.dtype, dtype),)
        if saved_here() == saved:
            call.casts += 1
            call.cast_bytes += nbytes_of(tensor)
        else:
            call.casts_saved += 1
        return copy

    return counting


def timed(op: Op, ruled: OpUnderRule, listeners: Sequence[Listener], clock: Clock) -> Op:
    """Return torch's own `op`, or what a list has in its place, whose dtype and time are noted in the call that makes it.

    Such a function may say which dtype it `computes` in, and report more to an argument `observer`, for the list that it `notes` about.
    """
    own = getattr(op, "computes", None)
    computes = "" if own is None else dtype_name(own)
    about = getattr(op, "notes", "")

    def timing(*args: Any, **kwargs: Any) -> Any:
        call = here.call
        if call is None:
            return op(*args, **kwargs)
        given = args if not kwargs else (*args, *kwargs.values())
        call.computed = computes or asked_dtype(given) or first_dtype(given)
        if about:
            kwargs["observer"] = noting(listeners, about, ruled.op, kwargs.get("observer"))
        started = clock()
        try:
            return op(*args, **kwargs)
        finally:
            call.op_seconds += clock() - started

    return timing


def observed(wrapper: Op, ruled: OpUnderRule, function: Op, listeners: Sequence[Listener], clock: Clock | None) -> Op:
    """Return `wrapper` with its calls reported to the listeners. A call inside a reported one is hmp's own and is not reported."""
    first = next((each for each in listeners if each.measures), listeners[0])

    def telling(*args: Any, **kwargs: Any) -> Any:
        if here.call is not None:
            return wrapper(*args, **kwargs)
        mode = here.functions
        if mode is None or mode.inside or not (modes := function_modes()) or function_mode_at(modes - 1) is not mode:
            return tell(args, kwargs)
        # the mode reports no inner calls, and while it is active each reading of a tensor's dtype takes four microseconds
        try:  # an interrupt may come right after the call
            torch_private.pop_function_mode()
            return tell(args, kwargs)
        finally:
            torch_private.push_function_mode(mode)

    def tell(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(ruled.op, ruled, function, args, kwargs)
        if here.function is not None:
            here.function.decided = True
        for each in listeners:
            each.begin(call)
        here.call = call
        try:
            call.result = wrapper(*args, **kwargs) if clock is None else _measured(wrapper, call, ruled, first)
        except BaseException as error:
            call.error = error
            raise
        finally:
            here.call = None
            end_all(listeners, call)
        return call.result

    return telling


def _measured(wrapper: Op, call: Call, ruled: OpUnderRule, listener: Listener) -> Any:
    """Return the wrapper's result. Where torch.autocast decides, inside the op or around it, what it does is looked at."""
    if ruled.rule.runs_autocast:
        call.is_autocast = not replaces_autocast(ruled, list(each_castable(call.given)))
    else:
        call.is_autocast = ruled.rule.dtype is not None and torch_private.is_any_autocast_enabled()
    if not call.is_autocast:
        return wrapper(*call.args, **call.kwargs)
    return _under_autocast(wrapper, call, ruled, vars(listener).setdefault("kernels", {}))


# --- what torch.autocast does inside an op ---


class _Kernels(Listener):
    """The dtypes of the first castable inputs of the ATen ops that compute, each once, in order, and the casts that are made."""

    def __init__(self) -> None:
        self.dtypes: dict[torch.dtype, None] = {}
        self.casts = self.cast_bytes = 0

    def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the op's own result."""
        result = run(*args, **kwargs)
        first = next(each_castable(torch_private.tree_leaves((args, kwargs))), None)
        if first is None:
            return result
        name = func._schema.name.partition("::")[2]
        if name == "_to_copy":
            if isinstance(result, Tensor) and castable(result) and result.dtype is not first.dtype:
                self.casts += 1
                self.cast_bytes += nbytes_of(first)
        elif name not in _MOVES and not func.is_view:
            self.dtypes[first.dtype] = None
        return result


def _under_autocast(wrapper: Op, call: Call, ruled: OpUnderRule, known: dict[Any, _Kernels]) -> Any:
    """Return the wrapper's result; the kernels are looked at once for calls with such arguments, and then `known`."""
    args, kwargs = call.args, call.kwargs
    if _compiling() or not torch_private.in_plain_autograd() or ruled.op in table.CHANGED_BY_LISTENING:
        result = wrapper(*args, **kwargs)
        # what runs inside is not seen; the result of an op on a list shows what a context made of it
        call.computed = "" if ruled.rule.runs_autocast or _compiling() else dtypes_of((result,))
        return result
    key = (ruled.op, ruled.rule, ruled.low_dtype, torch.is_grad_enabled(), *call.autocast.items(), *_form(args, kwargs))
    seen = known.get(key)
    if seen is None:
        seen, casts, cast_bytes = _Kernels(), call.casts, call.cast_bytes
        with hear_aten(seen):
            result = wrapper(*args, **kwargs)
        seen.casts -= call.casts - casts  # those that hmp makes itself are counted where they are made
        seen.cast_bytes -= call.cast_bytes - cast_bytes
        if len(known) < _MOST_KERNELS:
            known[key] = seen
    else:
        result = wrapper(*args, **kwargs)
    call.computed = ", ".join(map(dtype_name, seen.dtypes))
    call.casts += seen.casts
    call.cast_bytes += seen.cast_bytes
    return result


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what is equal for calls that run the same kernels on other values: shapes, dtypes and flags of tensors, and the rest."""
    return tuple(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_leaf) if isinstance(leaf, Tensor) else (type(leaf), str(leaf))
        for leaf in torch_private.tree_leaves((args, kwargs))
    )
