"""Writes of a user's function into a tensor that hmp had cast for it: they would end in the copy, so they are errors (R10)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import HmpError
from ..casting import Tensor, cast, each_tensor
from ..formatting import dtype_name
from ..torch_private import copy_on_write, is_functorchs
from .copied_views import Cast, refuse_writes, shares_memory


def watched_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`, as a tensor that counts the writes into it: one that is made in inference mode does not."""
    if not torch.is_inference_mode_enabled():
        return cast(tensor, dtype)
    with torch.inference_mode(mode=False):
        return cast(tensor, dtype)


_Call = tuple[Sequence[Any], Mapping[str, Any]]  # its positional arguments and its keywords


def call(op: Callable[..., Any], name: str, cast_call: _Call, given: _Call, order: Sequence[str]) -> Any:
    """Return the result of the user's function `op`, called with `cast_call` for `given`; `order` names positional arguments.

    No write into a tensor that was cast for it is lost: one by the function is an error, one into what it returned or kept will be.
    """
    copies = list(_copies(cast_call, given, order))
    result = op(*cast_call[0], **cast_call[1])
    for each in copies:
        each.refuse_writes(name)
    lows = [each.low for each in copies]
    kept = [low for low, references in zip(lows, map(_references, copies), strict=True) if references > _REFERENCES]
    if not kept and (not lows or not shares_memory(result, lows)):
        return result
    with contextlib.suppress(TypeError):  # a class that can have no subclass refuses nothing
        refuse_writes([*kept, result], name, lows, Cast([each.given for each in copies]))
    return result


class _Copy(NamedTuple):
    """A tensor that was cast for a call, the tensor that it was made of, and what shows whether either was written to."""

    argument: str
    low: Tensor
    given: Tensor
    versions: tuple[int, int | None] | None
    is_marked: bool

    def refuse_writes(self, op: str) -> None:
        """Raise HmpError where the function `op` wrote into it."""
        if self.versions is None or (self.low._version == self.versions[0] and not self._was_accessed()):
            return
        if self.low._version != self.versions[0] or self._is_changed():
            raise HmpError(
                f"{op} wrote into its argument `{self.argument}`, which was cast from {dtype_name(self.given.dtype)} to "
                f"{dtype_name(self.low.dtype)} for the call, so the write is lost; pass a {dtype_name(self.low.dtype)} tensor, return "
                f"the new values, or call it inside hmp.disable_casts()"
            )

    def _was_accessed(self) -> bool:
        """Return True if somebody asked for write access to it."""
        return self.is_marked and not (copy_on_write is None or copy_on_write.is_pending(self.low))

    def _is_changed(self) -> bool:
        """Return True if it has other values than the given tensor, where that one was not written to: torch does not count every write."""
        if self.versions is None or self.versions[1] != _version(self.given):
            return False
        with torch.no_grad():
            bits = torch.int32 if self.low.dtype is torch.float32 else torch.int16
            return not torch.equal(self.low.detach().view(bits), cast(self.given.detach(), self.low.dtype).view(bits))


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _copies(cast_call: _Call, given: _Call, order: Sequence[str]) -> Iterator[_Copy]:
    (args, kwargs), (cast_args, cast_kwargs) = given, cast_call
    names = [*order[: len(args)], *(f"argument {i + 1}" for i in range(len(order), len(args))), *kwargs]
    for name, old, new in zip(names, [*args, *kwargs.values()], [*cast_args, *cast_kwargs.values()], strict=True):
        if new is not old:
            for low, tensor in zip(each_tensor((new,)), each_tensor((old,)), strict=True):
                if low is not tensor:
                    counted = None if low.is_inference() else (low._version, _version(tensor))
                    yield _Copy(name, low, tensor, counted, counted is not None and _mark(low))


def _mark(low: Tensor) -> bool:
    """Set the copy-on-write mark on a tensor that nothing else holds yet. Return True if it could be set."""
    if copy_on_write is None or type(low) is not Tensor or not low.is_cpu or low.layout is not torch.strided or is_functorchs(low):
        return False
    try:
        copy_on_write.lazy_clone(low)
    except RuntimeError:
        return False
    return True


def _references(copy: _Copy) -> int:
    return sys.getrefcount(copy.low)


def _references_of_ours() -> int:
    """Return how many references `call` has to a copy that the user's function did not keep: in its arguments, and in two lists."""
    plain = torch.empty(1, device="cpu")
    arguments, copies = [plain], [_Copy("", plain, plain, None, False)]
    lows = [each.low for each in copies]
    del plain
    counted = _references(copies[0]) - 1  # here it is the given one, too
    del arguments, lows
    return counted


_REFERENCES = _references_of_ours()
