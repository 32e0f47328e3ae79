"""Patches of Lightning: its Trainer takes "hpu", and the classes for Gaudi of releases 1.8 to 2.0 run with a later torch."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch.distributed

from ... import HmpError
from ..habana.replacements import AttributeReplacements


def accept_hpu(module: types.ModuleType, is_ours: Callable[[], bool], replaced: AttributeReplacements) -> None:
    """Have the Trainer with that `accelerator_connector` take "hpu", until `replaced.undo()`.

    Arguments are translated if `is_ours()` is True when a Trainer is created: `lightning_habana` is hmp's.
    """
    connector = module._AcceleratorConnector
    original: Callable[..., None] = connector.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_ours():
            original(self, *args, **kwargs)
            return
        from . import trainer_classes as classes  # here: it imports Lightning, which is importing this module's caller

        strategies = classes.strategies_of(module.__name__.removesuffix(".trainer.connectors.accelerator_connector"))
        classes.register(module, strategies, replaced)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        classes.translate(module, strategies, call.arguments)
        original(*call.args, **call.kwargs)
        if isinstance(self.accelerator, classes.HPUAccelerator) and not isinstance(self.strategy, strategies):
            names = ", ".join(each.strategy_name for each in strategies)
            raise HmpError(f"accelerator 'hpu' expected strategy= to be 'auto' or one of {names}, got {type(self.strategy).__name__}")

    replaced.put(connector, "__init__", init)


def patch_broadcast(replaced: AttributeReplacements, strategies: types.ModuleType) -> None:
    """Replace the copy of torch's function in 1.9 and 2.0, which calls private functions that have another argument now."""
    if hasattr(strategies, "_hpu_broadcast_object_list"):
        replaced.put(strategies, "_hpu_broadcast_object_list", torch.distributed.broadcast_object_list)
