"""Patches of Lightning: its Trainer takes "hpu", and the classes for Gaudi of releases 1.8 to 2.0 run with a later torch."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed

from ... import HmpError
from ..habana import hpu
from ..habana.replacements import AttributeReplacements

_STRATEGIES = ("hpu_single", "hpu_parallel", "hpu_ddp")


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
        from .trainer_classes import HPUAccelerator, strategies_of  # here: these import Lightning, which is importing this module's caller

        _register(module, replaced)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        _translate(module, call.arguments)
        original(*call.args, **call.kwargs)
        if isinstance(self.accelerator, HPUAccelerator) and not isinstance(self.strategy, strategies_of(_package(module))):
            raise HmpError(
                f"accelerator 'hpu' expected strategy= to be 'auto' or one of {', '.join(_STRATEGIES)}, got {type(self.strategy).__name__}"
            )

    replaced.put(connector, "__init__", init)


def _register(module: types.ModuleType, replaced: AttributeReplacements) -> None:
    """Register "hpu" and its strategies in the package of that module, until `replaced.undo()`."""
    from .trainer_classes import HPUAccelerator, strategies_of

    strategies = strategies_of(_package(module))
    for registry, name, each in (
        (module.AcceleratorRegistry, "hpu", HPUAccelerator),
        *((module.StrategyRegistry, each.strategy_name, each) for each in strategies),
    ):
        if name not in registry:
            registry.register(name, each, description=each.__name__)
            replaced.on_undo(functools.partial(registry.pop, name, None))


def _package(module: types.ModuleType) -> str:
    return module.__name__.removesuffix(".trainer.connectors.accelerator_connector")


def _translate(module: types.ModuleType, given: dict[str, Any]) -> None:
    """Set the accelerator, strategy and plugin in a Trainer's arguments, where "hpu" implies them."""
    from .trainer_classes import HPUAccelerator, strategies_of

    package = _package(module)
    strategy = given["strategy"]
    theirs = getattr(strategy, "_accelerator", None)
    # accelerator="auto" may choose "hpu" if no other argument is for another device
    is_for_it = strategy in ("auto", *_STRATEGIES) if isinstance(strategy, str) else isinstance(strategy, strategies_of(package))
    wanted = given["accelerator"]
    if theirs is None and (wanted == "hpu" or (wanted == "auto" and is_for_it and hpu.is_available())):
        given["accelerator"] = HPUAccelerator()
    if not isinstance(given["accelerator"] if theirs is None else theirs, HPUAccelerator):
        return
    if strategy == "auto":
        devices, nodes = given["devices"], given["num_nodes"]
        count = HPUAccelerator.auto_device_count() if devices == "auto" else HPUAccelerator.parse_devices(devices) or 1
        several = count * (nodes if isinstance(nodes, int) else 1) > 1  # Lightning raises if num_nodes is not a number
        given["strategy"] = "hpu_parallel" if several else "hpu_single"
    _take_precision(module, given)


def _take_precision(module: types.ModuleType, given: dict[str, Any]) -> None:
    """Replace `precision=` by its plugin."""
    from .trainer_classes import HPUPrecisionPlugin

    precision = module._convert_precision_to_unified_args(given["precision"])
    plugins = given["plugins"] or []
    plugins = list(plugins) if isinstance(plugins, Iterable) else [plugins]
    has_plugin = any(isinstance(each, module.Precision) for each in plugins) or getattr(given["strategy"], "_precision_plugin", None)
    if precision not in (None, "32-true") and not has_plugin:
        given["plugins"], given["precision"] = [*plugins, HPUPrecisionPlugin(precision)], None


def patch_broadcast(replaced: AttributeReplacements, strategies: types.ModuleType) -> None:
    """Replace the copy of torch's function in 1.9 and 2.0, which calls private functions that have another argument now."""
    if hasattr(strategies, "_hpu_broadcast_object_list"):
        replaced.put(strategies, "_hpu_broadcast_object_list", torch.distributed.broadcast_object_list)
