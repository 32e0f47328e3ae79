"""torch's mark on memory (R18) does not survive that the memory grows: the next write would end in an assert inside torch. So Python code
that resizes takes the mark away first: offloaders and FSDP, which free a parameter's memory and fill it again.

A write that grows its target from inside a kernel (`out=` of another shape, of which torch warns) is not seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..cast_cache import write_marks
from ..patching import PatchedMethod, patches


def install() -> None:
    """Patches `UntypedStorage.resize_`, `Tensor.resize_` and `Tensor.resize_as_` until patches.restore()."""
    patches.rebind(torch.UntypedStorage, "resize_", _after(write_marks.unmark, torch.UntypedStorage.resize_))
    for name in ("resize_", "resize_as_"):
        own = getattr(torch.Tensor, name)
        patches.rebind(torch.Tensor, name, PatchedMethod(own, _after(_unmark_tensor, own), "torch", f"Tensor.{name}"))


def _after(unmark: Callable[[Any], None], own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def resize(self: Any, *args: Any, **kwargs: Any) -> Any:
        unmark(self)
        return own(self, *args, **kwargs)

    return resize


def _unmark_tensor(tensor: torch.Tensor) -> None:
    with contextlib.suppress(NotImplementedError, RuntimeError):  # a tensor without a storage
        write_marks.unmark(write_marks.storage_of(tensor))
