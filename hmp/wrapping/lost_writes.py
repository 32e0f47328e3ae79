"""Writes of a user's function into a tensor that hmp had cast for it: they would end in the copy, so they are errors (R10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..caches.write_marks import is_marked, mark
from ..casting import Tensor, cast, each_tensor
from ..errors import HmpError
from ..formatting import dtype_name
from .copied_views import Cast, Original, refuse_later_writes, refuse_writes


def watched_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, as a tensor that counts the writes into it: one that is made in inference mode does not."""
    if not torch.is_inference_mode_enabled():
        return cast(tensor, dtype)
    with torch.inference_mode(mode=False):
        return cast(tensor, dtype)


_Call = tuple[Sequence[Any], Mapping[str, Any]]  # its positional arguments and its keywords


def call(op: Callable[..., Any], name: str, cast_call: _Call, given: _Call, order: Sequence[str]) -> Any:
    """The result of `op`, called with `cast_call` in the place of `given`, such that no write into a tensor that was cast for it is lost: one
    of the function itself is an error, one into what it returned or kept will be. `order` names positional arguments."""
    copies = list(_copies(cast_call, given, order))
    result = op(*cast_call[0], **cast_call[1])
    for each in copies:
        each.refuse_writes(name)
    if not copies:
        return result
    original = Original(None, (), {}, copies[0].given.dtype, Cast(each.given for each in copies))
    refuse_later_writes([each.low for each in copies], name, original)
    return refuse_writes(result, name, [each.low for each in copies], original)


class _Copy(NamedTuple):
    """A tensor that was cast for a call, the tensor that it was made of, and what shows whether either was written to."""

    argument: str
    low: Tensor
    given: Tensor
    versions: tuple[int, int] | None
    is_marked: bool

    def refuse_writes(self, op: str) -> None:
        """Raises HmpError where the function `op` wrote into it."""
        if self.versions is None:
            return
        low, given = self.low._version, self.versions[1] if self.given.is_inference() else self.given._version
        if low != self.versions[0] or ((low, given) == self.versions and self._is_changed()):
            raise HmpError(
                f"{op} wrote into `{self.argument}`, which hmp had cast to {dtype_name(self.low.dtype)} for it: the write would be lost. "
                f"Give it a tensor of that dtype, let it return the new values, or call it inside hmp.disable_casts()"
            )

    def _is_changed(self) -> bool:
        """Whether it was written to in a way that torch does not count: the mark tells who asked for write access, the values who used it."""
        if not self.is_marked or is_marked(self.low):
            return False
        with torch.no_grad():
            bits = torch.int32 if self.low.dtype is torch.float32 else torch.int16
            return not torch.equal(self.low.detach().view(bits), cast(self.given.detach(), self.low.dtype).view(bits))


def _copies(cast_call: _Call, given: _Call, order: Sequence[str]) -> Iterator[_Copy]:
    (args, kwargs), (cast_args, cast_kwargs) = given, cast_call
    names = [*order[: len(args)], *(f"argument {i + 1}" for i in range(len(order), len(args))), *kwargs]
    for name, old, new in zip(names, [*args, *kwargs.values()], [*cast_args, *cast_kwargs.values()], strict=True):
        for low, tensor in zip(each_tensor((new,)), each_tensor((old,)), strict=True):
            if low is not tensor:
                counted = None if low.is_inference() else (low._version, 0 if tensor.is_inference() else tensor._version)
                can_be_marked = counted is not None and type(low) is type(tensor) is Tensor and low.layout is torch.strided
                yield _Copy(name, low, tensor, counted, can_be_marked and not mark(low))
