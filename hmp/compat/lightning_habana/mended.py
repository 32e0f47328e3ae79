"""Lightning 1.6 to 2.0 has Gaudi itself and is left as it is, but for what asks of torch, or of the machine, what there no longer is."""

from __future__ import annotations

import functools
import types

import torch.distributed

from ..habana import hpu
from ..habana.replacements import Replacements
from ..import_finders import after_import
from ..lightning_homes import HOMES, release


def install(replaced: Replacements) -> None:
    """Mends them as soon as a program has imported them, until `replaced.undo()`."""
    for home in HOMES:
        replaced.on_undo(after_import(f"{home}.strategies.hpu_parallel", functools.partial(_broadcast, replaced)))
    replaced.on_undo(after_import("pytorch_lightning.accelerators.hpu", functools.partial(_count, replaced)))


def _broadcast(replaced: Replacements, strategies: types.ModuleType) -> None:
    """1.9 and 2.0 have a copy of torch's function for "hpu", which calls private ones that have grown an argument."""
    if hasattr(strategies, "_hpu_broadcast_object_list"):
        replaced.put(strategies, "_hpu_broadcast_object_list", torch.distributed.broadcast_object_list)


def _count(replaced: Replacements, accelerators: types.ModuleType) -> None:
    """1.6 takes `devices="auto"` for eight of them, as many as Habana's machines had."""
    if release("pytorch_lightning") == (1, 6):
        replaced.put(accelerators.HPUAccelerator, "auto_device_count", staticmethod(hpu.device_count))
