"""What torch's mark on memory (R18) does not survive: a graph that is captured, and memory that grows.

A captured graph's replays write by address, which clears no mark: from the first capture on no memory of the device is marked. What is
captured then has casts of its own, as it must: a replay casts the weights that are there. A write into marked memory that has grown would
end in an assert inside torch: Python code that resizes takes the mark away first, as offloaders and FSDP do, which free a parameter's
memory and fill it again. A write that grows its target from inside a kernel (`out=` of another shape, of which torch warns) is not seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..cast_cache import cast_cache, mark_proof, write_marks
from ..patching import PatchedMethod, patches

# The classes of captured graphs that torch may have, and their type of device; None is the one that torch.accelerator names.
# on Gaudi: a step is captured by torch.hpu.HPUGraph.capture_begin(), which is there before convert(), and a replay writes by address.
_CLASSES = (("cuda", "CUDAGraph", "cuda"), ("xpu", "XPUGraph", "xpu"), ("hpu", "HPUGraph", "hpu"), ("accelerator", "Graph", None))


def install() -> None:
    """Patch `capture_begin` of the classes of captured graphs until patches.restore(); not torch's own where it has no accelerator."""
    has_accelerator = torch.accelerator.current_accelerator() is not None
    for module, name, device_type in _CLASSES:
        graph = getattr(getattr(torch, module, None), name, None)
        if "capture_begin" in vars(graph or object) and (has_accelerator or not graph.__module__.startswith("torch.")):
            patches.rebind(graph, "capture_begin", _telling(device_type, graph.capture_begin))  # type: ignore[union-attr]
    _install_resizing()


def _telling(device_type: str | None, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        accelerator = torch.accelerator.current_accelerator()
        if mark_proof.captures(device_type or ("cuda" if accelerator is None else accelerator.type)):
            cast_cache.clear_cache()
        return own(self, *args, **kwargs)

    return capture_begin


# --- memory that grows ----------------------------------------------------------------------------------------------------------


def _install_resizing() -> None:
    """Patch `UntypedStorage.resize_`, `Tensor.resize_` and `Tensor.resize_as_` until patches.restore()."""
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
