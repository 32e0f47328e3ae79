"""A captured graph's replays write by address, which clears no mark (R18): from the first capture on no memory of the device is marked.

What is captured then has casts of its own, as it must: a replay casts the weights that are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..cast_cache import cast_cache, mark_proof
from ..patching import patches

# The classes of captured graphs that torch may have, and their type of device; None is the one that torch.accelerator names.
# on Gaudi: a step is captured by torch.hpu.HPUGraph.capture_begin(), which is there before convert(), and a replay writes by address.
_CLASSES = (("cuda", "CUDAGraph", "cuda"), ("xpu", "XPUGraph", "xpu"), ("hpu", "HPUGraph", "hpu"), ("accelerator", "Graph", None))


def install() -> None:
    """Patches `capture_begin` of the classes of captured graphs until patches.restore(); not torch's own where it has no accelerator."""
    has_accelerator = torch.accelerator.current_accelerator() is not None
    for module, name, device_type in _CLASSES:
        graph = getattr(getattr(torch, module, None), name, None)
        if "capture_begin" in vars(graph or object) and (has_accelerator or not graph.__module__.startswith("torch.")):
            patches.rebind(graph, "capture_begin", _telling(device_type, graph.capture_begin))  # type: ignore[union-attr]


def _telling(device_type: str | None, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        accelerator = torch.accelerator.current_accelerator()
        if mark_proof.captures(device_type or ("cuda" if accelerator is None else accelerator.type)):
            cast_cache.clear_cache()
        return own(self, *args, **kwargs)

    return capture_begin
