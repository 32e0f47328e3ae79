"""Writes of a user's function into a tensor that hmp had cast for it: they would end in the copy, so they are errors (R10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..casting import Tensor, cast, each_tensor
from ..errors import HmpError
from ..formatting import dtype_name


def watched_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, as a tensor that counts the writes into it: one that is made in inference mode does not."""
    if not torch.is_inference_mode_enabled():
        return cast(tensor, dtype)
    with torch.inference_mode(mode=False):
        return cast(tensor, dtype)


_Call = tuple[Sequence[Any], Mapping[str, Any]]  # its positional arguments and its keywords


class Copies:
    """The tensors that were cast for a call, and how often each had been written to before it. `order` names positional arguments."""

    def __init__(self, cast_call: _Call, call: _Call, order: Sequence[str]) -> None:
        (args, kwargs), (cast_args, cast_kwargs) = call, cast_call
        names = [*order[: len(args)], *(f"argument {i + 1}" for i in range(len(order), len(args))), *kwargs]
        self._found: list[tuple[str, Tensor, int]] = []
        for name, given, new in zip(names, [*args, *kwargs.values()], [*cast_args, *cast_kwargs.values()], strict=True):
            for low, tensor in zip(each_tensor((new,)), each_tensor((given,)), strict=True):
                if low is not tensor and not low.is_inference():
                    self._found.append((name, low, low._version))

    def refuse_writes(self, op: str) -> None:
        """Raises HmpError where the function `op` wrote into one of them."""
        for name, low, version in self._found:
            if low._version != version:
                raise HmpError(
                    f"{op} wrote into `{name}`, which hmp had cast to {dtype_name(low.dtype)} for it: the write would be lost. "
                    f"Give it a tensor of that dtype, let it return the new values, or call it inside hmp.disable_casts()"
                )
