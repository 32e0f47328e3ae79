"""The wrapper that takes every call of an op: it casts, saturates, writes into `out` and runs again without a kernel, as its rule says."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...errors import HmpError
from .. import casting
from ..casting import FINITE_MAX, Caster, Tensor, cast_call, castable, dtype_name, each_castable, write_out
from ..ops import sites, table
from ..torch_private import in_no_transform
from . import kernels, overflow
from .kernels import GIVEN_UP, Kernels
from .op import Op, OpUnderRule, castable_inputs, chooser, flag

_grad_enabled = torch.is_grad_enabled


class GeneralWrapper:
    """An op under its rule, for calls of any kind.

    Args:
        op: The function that is called with the cast arguments.
        ruled: The op under its rule.
        caster: Casts a tensor.
    """

    def __init__(self, op: Op, ruled: OpUnderRule, caster: Caster) -> None:
        self.op, self.ruled, self.rule, self.facts, self.caster = op, ruled, ruled.rule, ruled.facts, caster
        self.kernels = Kernels(ruled)
        self.is_arithmetic, self.fills = overflow.is_arithmetic(ruled), overflow.fills(ruled)
        self._dtype_of = chooser(ruled)
        self._tries_torch_first = ruled.facts.takes_some_mixtures and not ruled.rule.is_list
        base = sites.base_of(ruled.op)
        takes_mixtures = self.is_arithmetic or ruled.op in table.PROMOTED_BY_TORCH
        self._mixes_in_place = takes_mixtures and base not in table.MIXED_INPLACE_RAISES
        self._refused_in_backward = ruled.facts.in_place and base in table.MIXED_BACKWARD_RAISES

    def wrapper(self) -> Op:
        """Return the function that takes every call of the op; one whose tensors support no cast is left to torch."""
        return kernels.or_uncast(self.in_place if self.facts.in_place else self._call, self.op)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        at = self.facts.out_at
        if at is not None and at < len(args):
            args, kwargs = args[:at], {**kwargs, "out": args[at]}
        if kwargs.get("out") is not None and not self.facts.users:
            return self._into_out(args, kwargs)
        if self.facts.inplace_at is not None and flag(args, kwargs, self.facts.inplace_at):
            return self.in_place(*args, **kwargs)
        try:
            return self._out_of_place(args, kwargs)
        except RuntimeError as error:
            result = self.retry(error, args, kwargs)
            if result is GIVEN_UP:
                raise
            return result

    def retry(self, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the call after it raised `error` in the low-precision dtype: in float32, or of a mixture cast.

        GIVEN_UP if the op may not run again, or raises again: random ops, ops that write into their inputs, and where the user's Python saw
        the call. The caller, who caught `error`, then re-raises it by a bare `raise`.
        """
        tensors = castable_inputs(args, kwargs, self.ruled)
        if not tensors or not self.facts.retries:
            return GIVEN_UP
        dtype, is_uncast, keep = self._dtype_of(tensors), self.rule.leaves_to_torch, self.facts.keep
        if dtype not in casting.LOW or not kernels.may_run_again(error, tensors):
            return GIVEN_UP
        is_mixed = is_uncast and any(t.dtype is not tensors[0].dtype for t in tensors)
        # a tensor and its tangent in forward-mode differentiation may differ, too
        is_mixture = (is_mixed or not in_no_transform()) and kernels.is_mixture(error)
        try:
            # through float32: of a tensor that has the dtype already this casts the tangent, which may have another one
            cast_args, cast_kwargs = cast_call(args, kwargs, torch.float32, casting.cast, keep)
            if is_mixture:
                cast_args, cast_kwargs = cast_call(
                    tuple(cast_args), cast_kwargs, tensors[0].dtype if is_uncast else dtype, self.caster, keep
                )
            result = self.op(*cast_args, **cast_kwargs)
        except RuntimeError as second:
            if not kernels.is_torchs_own(second):
                raise
            return GIVEN_UP
        if not is_mixture:
            self.kernels.remember(tensors, dtype, args, kwargs)
        return result

    def _target(self, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.dtype, bool]:
        """Return the dtype of the call, float32 if that one is known to have no kernel, and whether the inputs are cast to it."""
        target = self._dtype_of(tensors)
        if not self.rule.only and self.kernels.lacks(tensors, target, args, kwargs):
            return torch.float32, True
        return target, not self.rule.leaves_to_torch

    def _overflows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
        return self.is_arithmetic and dtype is not torch.float32 and overflow.overflows(self.ruled, args, kwargs, dtype)

    # --- a call that writes into no argument ------------------------------------------------------------------------------

    def _out_of_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op, ruled, facts = self.op, self.ruled, self.facts
        tensors = castable_inputs(args, kwargs, ruled)
        if not tensors:
            return op(*args, **kwargs)
        target, casts = self._target(tensors, args, kwargs)
        if self._overflows(args, kwargs, target):
            return overflow.saturated(op, ruled, args, kwargs, target)
        if not casts:
            return op(*args, **kwargs)
        if self.fills:
            args, kwargs = overflow.bounded(args, kwargs, target)
        if all(t.dtype is target for t in tensors):
            return op(*args, **kwargs)
        # `target` is another dtype where the first input's is known to have no kernel
        if self._tries_torch_first and target is tensors[0].dtype and _check_is_reliable(tensors, ruled, args, kwargs):
            try:
                return op(*args, **kwargs)
            except RuntimeError as error:
                if not kernels.may_run_again(error, tensors):
                    raise
        cast_args, cast_kwargs = cast_call(args, kwargs, target, self.caster, facts.keep)
        if facts.users:
            return _call_users(op, ruled.op, (cast_args, cast_kwargs), (args, kwargs), facts.order)
        return op(*cast_args, **cast_kwargs)

    # --- a call that writes into its first input --------------------------------------------------------------------------

    def in_place(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op with the other castable inputs in the dtype of the first, or as they are where torch takes mixtures.

        Without a kernel for that dtype it computes in float32.
        """
        op, facts = self.op, self.facts
        first: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if facts.users:  # a user's function: the `self` of a method isn't a tensor
            first = next(each_castable((*args, *kwargs.values())), None)
        tensors = castable_inputs(args, kwargs, self.ruled)
        if not castable(first) or tensors is None:
            return op(*args, **kwargs)
        if self._refused_in_backward and not (_grad_enabled() and any(t.requires_grad for t in tensors)):
            return op(*args, **kwargs)
        if self.kernels.lacks([first], first.dtype, (), {}):
            # computed in float32, then written into the input itself
            cast_args, cast_kwargs = self._cast_for(first, torch.float32, args, kwargs)
            return first.copy_(op(*cast_args, **cast_kwargs))
        if self.rule.leaves_to_torch:
            saturates = self._overflows(args, kwargs, first.dtype)
            return overflow.saturated(op, self.ruled, args, kwargs, first.dtype) if saturates else op(*args, **kwargs)
        cast_args, cast_kwargs = self._cast_for(first, first.dtype, args, kwargs)
        if facts.users:
            return _call_users(op, self.ruled.op, (cast_args, cast_kwargs), (args, kwargs), facts.order)
        return op(*cast_args, **cast_kwargs)

    def _cast_for(
        self, first: Tensor, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with castable tensors in `dtype`; the values of a fill stay finite in the dtype of `first`."""
        if self.fills:
            # an index isn't a value: x[70000] = s
            index = args[1:2] if self.ruled.op == "setitem" else ()
            values, kwargs = overflow.bounded(args[1 + len(index) :], kwargs, first.dtype, overflow.written_value)
            args = (first, *index, *values) if args else args
        return cast_call(args, kwargs, dtype, self.caster, self.facts.keep)

    # --- a call with `out=` -----------------------------------------------------------------------------------------------

    def _into_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result in `kwargs["out"]`, which keeps its dtype."""
        op, ruled = self.op, self.ruled
        out, rest = kwargs["out"], {name: value for name, value in kwargs.items() if name != "out"}
        tensors = castable_inputs(args, rest, ruled)
        if not tensors:
            return op(*args, **kwargs)
        first = args[0] if args else None
        if out is first and not (castable(first) and self._overflows(args, rest, first.dtype)):
            return op(*args, **kwargs) if self._mixes_in_place else self.in_place(*args, **kwargs)
        target, casts = self._target(tensors, args, rest)
        limit = out.dtype if castable(out) and FINITE_MAX[out.dtype] < FINITE_MAX[target] else target
        saturates = self._overflows(args, rest, limit)
        if not (casts or saturates) or (_grad_enabled() and any(t.requires_grad for t in (*tensors, *each_castable((out,))))):
            return op(*args, **kwargs)  # where a gradient is needed this is torch's own error: out= takes no part in autograd
        if saturates:
            return write_out(overflow.saturated(op, ruled, args, rest, limit), out)
        cast_args, cast_kwargs = cast_call(args, rest, target, self.caster, self.facts.keep)
        if not self._must_be_copied(tensors, out, target):
            return op(*cast_args, **cast_kwargs, out=out)  # torch writes into `out`, or raises
        result = write_out(op(*cast_args, **cast_kwargs), out)
        return None if ruled.op.endswith("_copy") and isinstance(out, (list, tuple)) else result  # unbind_copy and the like

    def _must_be_copied(self, tensors: list[Tensor], out: Any, target: torch.dtype) -> bool:
        """Return True if the result is to be copied into `out`, which has another dtype than the inputs are cast to.

        A listed op takes an `out` of any castable dtype: whether its inputs are low already depends on what ran before. An op on no list
        takes one of its inputs' dtypes, or the one that torch computes in without casts, and torch decides on all others.
        """
        others = {t.dtype for t in each_castable((out,))} - {target}
        if self.rule.is_list:
            return bool(others)
        return bool(others) and others <= {casting.widest(tensors, count_0dim=True), *(t.dtype for t in tensors)}


def _check_is_reliable(tensors: list[Tensor], ruled: OpUnderRule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if torch's answer to a mixture of dtypes can be trusted: only some kernels check, and meta or empty tensors run none."""
    if ruled.op not in table.REFUSED_BY_KERNELS_ALONE or all(casting.has_values(t) and t.numel() for t in tensors):
        return True
    # a target of probabilities may be in another dtype than the scores, on every device
    return ruled.op == "cross_entropy" and castable(args[1] if len(args) > 1 else kwargs.get("target"))


# --- users' functions: a write into a copy would be lost --------------------------------------------------------------------

_Call = tuple[Sequence[Any], Mapping[str, Any]]  # its positional arguments and its keywords
_Copy = tuple[str, Any, Any, Any]  # the argument, what was given, its copy, and what that was before the call


def watched_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`, as a tensor that counts the writes into it: one that is made in inference mode does not."""
    with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        return casting.cast(tensor, dtype)


def _call_users(op: Op, name: str, cast_given: _Call, given: _Call, order: Sequence[str]) -> Any:
    """Return the result of the user's function `op`, called with `cast_given` for `given`; `order` names positional arguments.

    What it writes into a cast tensor is an error, and its changes of a list or dict that was copied are made in the caller's own. Those of
    a generator or a coroutine are looked at when it ends.
    """
    (args, kwargs), (cast_args, cast_kwargs) = given, cast_given
    names = [*order[: len(args)], *(f"argument {i + 1}" for i in range(len(order), len(args))), *kwargs]
    arguments = zip(names, [*args, *kwargs.values()], [*cast_args, *cast_kwargs.values()], strict=True)
    copies = [copy for argument in arguments for copy in _copies(*argument)]
    with _settled(name, copies):
        result = op(*cast_args, **cast_kwargs)
    if inspect.iscoroutine(result) or (inspect.isgenerator(result) and inspect.isawaitable(result)):
        return _until_it_returns(result, name, copies)
    return _until_it_ends(result, name, copies) if inspect.isgenerator(result) else result


def _until_it_ends(generator: Generator[Any, Any, Any], name: str, copies: list[_Copy]) -> Generator[Any, Any, Any]:
    with _settled(name, copies):
        return (yield from generator)


async def _until_it_returns(coroutine: Any, name: str, copies: list[_Copy]) -> Any:
    with _settled(name, copies):
        return await coroutine


def _copies(argument: str, given: Any, copy: Any) -> Iterator[_Copy]:
    """Yield the copy of an argument and the copies inside it, with what they were before the call: a version, or a container's items."""
    if isinstance(copy, Tensor) and copy is not given:
        yield argument, given, copy, copy._version
    elif copy is not given:
        yield argument, given, copy, _ids(copy)
        for (_, old), (_, new) in zip(_items(given), _items(copy), strict=True):
            yield from _copies(argument, old, new)


@contextlib.contextmanager
def _settled(name: str, copies: list[_Copy]) -> Iterator[None]:
    """Run a block in which the function `name` gets `copies`. What it put into a container is put into the caller's."""
    try:
        yield
    finally:
        own = {id(copy): given for _, given, copy, _ in copies}
        for _, given, copy, before in copies:
            if not isinstance(copy, Tensor) and _ids(copy) != before:
                given.clear()
                put = given.__setitem__ if isinstance(given, dict) else given.insert
                for key, item in _items(copy):
                    put(key, own.get(id(item), item))
    for argument, given, copy, before in copies:
        if isinstance(copy, Tensor) and copy._version != before:
            raise HmpError(
                f"{name} wrote into its argument `{argument}`, which was cast from {dtype_name(given.dtype)} to {dtype_name(copy.dtype)} "
                f"for the call, so the write is lost; pass a {dtype_name(copy.dtype)} tensor, return the new values, or call it inside "
                f"hmp.disable_casts()"
            )


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _ids(container: Any) -> list[tuple[Any, int]]:
    return [(key, id(item)) for key, item in _items(container)]
