"""Lightning's Trainer is told what "hpu" is: what it is called with is translated, and it does with that what it always does."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

from ... import HmpError
from ..habana import hpu
from ..habana.replacements import Replacements

_STRATEGIES = ("hpu_single", "hpu_parallel", "hpu_ddp")


def take_hpu(module: types.ModuleType, is_ours: Callable[[], bool], replaced: Replacements) -> None:
    """Has the Trainer whose `accelerator_connector` that is take "hpu", until `replaced.undo()`.

    Where `lightning_habana` is not hmp's, which `is_ours()` says when a Trainer is made, nothing is translated.
    """
    connector = module._AcceleratorConnector
    original: Callable[..., None] = connector.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_ours():
            original(self, *args, **kwargs)
            return
        from .accelerator import HPUAccelerator  # here: these import Lightning, which this is a part of
        from .strategies import strategies_of

        register(module, replaced)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        _translate(module, call.arguments)
        original(*call.args, **call.kwargs)
        if isinstance(self.accelerator, HPUAccelerator) and not isinstance(self.strategy, strategies_of(_home(module))):
            raise HmpError(
                f"{type(self.strategy).__name__} is no strategy for 'hpu'; give strategy=\"auto\", or one of {', '.join(_STRATEGIES)}"
            )

    replaced.put(connector, "__init__", init)


def register(module: types.ModuleType, replaced: Replacements) -> None:
    """Registers "hpu" and the strategies for it in that package, until `replaced.undo()`."""
    from .accelerator import HPUAccelerator
    from .strategies import strategies_of

    strategies = strategies_of(_home(module))
    for registry, name, each in (
        (module.AcceleratorRegistry, "hpu", HPUAccelerator),
        *((module.StrategyRegistry, each.strategy_name, each) for each in strategies),
    ):
        if name not in registry:
            registry.register(name, each, description=each.__name__)
            replaced.on_undo(functools.partial(registry.pop, name, None))


def _home(module: types.ModuleType) -> str:
    return module.__name__.removesuffix(".trainer.connectors.accelerator_connector")


def _translate(module: types.ModuleType, given: dict[str, Any]) -> None:
    """Names in what a Trainer is given the accelerator, the strategy and the plugin to take, where they follow from "hpu"."""
    from .accelerator import HPUAccelerator
    from .strategies import strategies_of, taken_by

    home = _home(module)
    given["strategy"] = strategy = taken_by(home, given["strategy"])
    theirs = getattr(strategy, "_accelerator", None)
    # of "auto" it may be the one that is found where nothing that was given is for another device
    is_for_it = strategy in ("auto", *_STRATEGIES) if isinstance(strategy, str) else isinstance(strategy, strategies_of(home))
    asked = given["accelerator"]
    if theirs is None and (asked == "hpu" or (asked == "auto" and is_for_it and hpu.is_available())):
        given["accelerator"] = HPUAccelerator()
    if not isinstance(given["accelerator"] if theirs is None else theirs, HPUAccelerator):
        return
    if strategy == "auto":
        devices, nodes = given["devices"], given["num_nodes"]
        count = HPUAccelerator.auto_device_count() if devices == "auto" else HPUAccelerator.parse_devices(devices) or 1
        several = count * (nodes if isinstance(nodes, int) else 1) > 1  # what is no number is Lightning's to say
        given["strategy"] = "hpu_parallel" if several else "hpu_single"
    _take_precision(module, given)


def _take_precision(module: types.ModuleType, given: dict[str, Any]) -> None:
    """Puts the plugin that a `precision=` stands for among the plugins."""
    from .precision import HPUPrecisionPlugin

    precision = module._convert_precision_to_unified_args(given["precision"])
    plugins = given["plugins"] or []
    plugins = list(plugins) if isinstance(plugins, Iterable) else [plugins]
    has_plugin = any(isinstance(each, module.Precision) for each in plugins) or getattr(given["strategy"], "_precision_plugin", None)
    if precision not in (None, "32-true") and not has_plugin:
        given["plugins"], given["precision"] = [*plugins, HPUPrecisionPlugin(precision)], None
