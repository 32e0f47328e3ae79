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

__all__ = ["register", "take_hpu"]

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
        _Given(module, call.arguments).translate()
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


class _Given:
    """What a Trainer was called with."""

    def __init__(self, module: types.ModuleType, arguments: dict[str, Any]) -> None:
        self._module = module
        self._given = arguments

    def translate(self) -> None:
        """Names the accelerator, the strategy and the plugin that Lightning is to take where they follow from "hpu"."""
        from .accelerator import HPUAccelerator
        from .strategies import taken_by

        given = self._given
        given["strategy"] = strategy = taken_by(_home(self._module), given["strategy"])
        theirs = getattr(strategy, "_accelerator", None)
        if theirs is None and (given["accelerator"] == "hpu" or (given["accelerator"] == "auto" and self._is_free())):
            given["accelerator"] = HPUAccelerator()
        if not isinstance(given["accelerator"] if theirs is None else theirs, HPUAccelerator):
            return
        if strategy == "auto":
            given["strategy"] = "hpu_parallel" if self._processes() > 1 else "hpu_single"
        self._take_precision()

    def _is_free(self) -> bool:
        """Whether "hpu" may be the one that is found: nothing that was given is for another device."""
        from .strategies import strategies_of

        strategy = self._given["strategy"]
        is_for_it = (
            strategy in ("auto", *_STRATEGIES) if isinstance(strategy, str) else isinstance(strategy, strategies_of(_home(self._module)))
        )
        return is_for_it and hpu.is_available()

    def _processes(self) -> int:
        """How many processes are asked for; 1 where that is no number, which is Lightning's to say."""
        from .accelerator import HPUAccelerator

        devices, nodes = self._given["devices"], self._given["num_nodes"]
        count = HPUAccelerator.auto_device_count() if devices == "auto" else HPUAccelerator.parse_devices(devices) or 1
        return count * (nodes if isinstance(nodes, int) else 1)

    def _take_precision(self) -> None:
        """Puts the plugin that a `precision=` stands for among the plugins."""
        from .precision import HPUPrecisionPlugin

        given, module = self._given, self._module
        precision = module._convert_precision_to_unified_args(given["precision"])
        plugins = given["plugins"] or []
        plugins = list(plugins) if isinstance(plugins, Iterable) else [plugins]
        has_plugin = any(isinstance(each, module.Precision) for each in plugins) or getattr(given["strategy"], "_precision_plugin", None)
        if precision in (None, "32-true") or has_plugin:
            return
        given["plugins"], given["precision"] = [*plugins, HPUPrecisionPlugin(precision)], None
