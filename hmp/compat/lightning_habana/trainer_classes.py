"""The classes of `lightning_habana.pytorch`: Lightning's accelerator, strategies and mixed precision for "hpu", by hmp's casts."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ... import HmpError, Policy
from ..habana import backends, hpu
from ..habana.device_map import actual_device
from ..habana.replacements import AttributeReplacements
from ..lightning import HMPPrecision
from ..lightning_packages import without_gaudi

_BASES = tuple(importlib.import_module(f"{package}.accelerators").Accelerator for package in without_gaudi())
_Accelerators: Any = type("_Accelerators", _BASES, {})


class HPUAccelerator(_Accelerators):  # type: ignore[misc]  # its bases are known when it is imported
    """The accelerator "hpu": `Trainer(accelerator=HPUAccelerator(), devices=1)`, or `Trainer(accelerator="hpu")`.

    On the CPU `devices` is the number of processes, any number. Of other devices it is at most the number of them.
    """

    def setup_device(self, device: torch.device) -> None:
        """Make the device the current one. Raise HmpError if it is not an "hpu"."""
        if device.type != "hpu":
            raise HmpError(f"HPUAccelerator expected a strategy on 'hpu', got one on {str(device)!r}; leave the strategy's device out")
        if device.index is not None:
            hpu.set_device(device)

    def teardown(self) -> None:
        """Do nothing: there is nothing to release."""

    def get_device_stats(self, device: torch.device | str | int | None) -> dict[str, int]:
        """Return Habana's memory_stats: bytes, and counts of allocations, which are 0 if the device does not count them."""
        return hpu.memory_stats(device)

    @staticmethod
    def parse_devices(devices: int | str | list[int] | None) -> int | None:
        """Return the number of devices. Raise HmpError if it is not a number >= 1, or more than there are."""
        if devices is None:
            return None
        try:
            count = int(devices)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            count = 0
        if count < 1 or isinstance(devices, (bool, float)):
            raise HmpError(f"devices= expected a number >= 1 or 'auto' for accelerator 'hpu', got {devices!r}")
        there = hpu.device_count()
        if count > there and hpu.get_device_name() != "cpu":
            raise HmpError(
                f"devices= expected at most {there}, the number of devices of 'hpu', got {devices!r}; map 'hpu' to the CPU for more"
            )
        return count

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """Return "hpu" once for each device; the strategy chooses that of a process."""
        return [torch.device("hpu")] * devices

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices for `devices="auto"`: all, or 1 on the CPU."""
        return hpu.device_count()

    @staticmethod
    def is_available() -> bool:
        """Return True if "hpu" is mapped to a device."""
        return hpu.is_available()

    @staticmethod
    def name() -> str:
        """Return the name in Lightning's registry."""
        return "hpu"

    @staticmethod
    def get_device_name() -> str:
        """Return the name of the device that "hpu" is mapped to."""
        return str(hpu.get_device_name())

    @staticmethod
    def is_lazy() -> bool:
        """Return False: ops run when they are called."""
        return False


_FLOAT32 = ("32-true", "32")
_LOW = {"bf16-mixed": torch.bfloat16, "bf16": torch.bfloat16, "16-mixed": torch.float16}


class HPUPrecisionPlugin(HMPPrecision):
    """HMPPrecision under Habana's name: `Trainer(plugins=[HPUPrecisionPlugin(device="hpu", precision="bf16-mixed")])`.

    `Trainer(accelerator="hpu", precision="bf16-mixed")` is the same.

    Args:
        precision: "bf16-mixed": the lists in the environment variables LOWER_LIST and FP32_LIST, else the policy "habana". "16-mixed": the
            same in float16, with a scaled loss. "32-true": no casts.
        device: Accepted for Habana's scripts; has no effect.

    Raises:
        HmpError: For any other precision.
    """

    def __init__(self, precision: str = "32-true", device: str = "hpu") -> None:
        if precision not in (*_FLOAT32, *_LOW):
            raise HmpError(
                f"precision= expected one of {', '.join((*_LOW, *_FLOAT32))}, got {precision!r}; for lists of your own use "
                "plugins=[HMPPrecision(policy)]"
            )
        self.device = device
        self._casts = precision in _LOW
        super().__init__(Policy.from_env().replace(dtype=_LOW[precision]) if self._casts else Policy.load("habana"))
        if not self._casts:
            self.precision = "32-true"

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Return a context in which the policy is active; with "32-true" it does nothing."""
        with super().forward_context() if self._casts else contextlib.nullcontext():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the policy and the state of the loss scaler, if there is one; {} with "32-true"."""
        return super().state_dict() if self._casts else {}


class _Parallel:
    """The mixin that turns DDPStrategy into that of "hpu"."""

    local_rank: int

    @property
    def root_device(self) -> torch.device:
        """The device of this process, by its local rank."""
        device: torch.device = super().root_device  # type: ignore[misc]
        return torch.device("hpu", self.local_rank) if device.type == "hpu" and device.index is None else device

    def setup_distributed(self) -> None:
        """Connect the processes."""
        backends.register_hccl()  # init_process_group() then takes an "hpu" as its device_id
        super().setup_distributed()  # type: ignore[misc]

    def determine_ddp_device_ids(self) -> None:
        """Return None: the model is on the device already."""

    def _get_process_group_backend(self) -> str:
        """Return "nccl" on CUDA and else "gloo", whose features Lightning knows; another backend as it was given."""
        given: str | None = self._process_group_backend  # type: ignore[has-type]
        if given in (None, "hccl"):
            given = "nccl" if actual_device(self.root_device).type == "cuda" else "gloo"
        self._process_group_backend = given
        return str(given)


@functools.cache
def strategies_of(package: str) -> tuple[Any, Any, Any]:
    """Return the strategies for the Trainer of that package: single, parallel, and parallel under its newer name."""
    theirs: Any = importlib.import_module(f"{package}.strategies")

    class SingleHPUStrategy(theirs.SingleDeviceStrategy):  # type: ignore[misc]
        """One process on one device: `Trainer(strategy=SingleHPUStrategy())`."""

        strategy_name = "hpu_single"

        def __init__(self, device: Any = "hpu", *args: Any, **kwargs: Any) -> None:
            super().__init__(device, *args, **kwargs)

    class HPUParallelStrategy(_Parallel, theirs.DDPStrategy):  # type: ignore[misc]
        """A process for each device: `Trainer(devices=2, strategy=HPUParallelStrategy())`. Arguments are those of DDPStrategy."""

        strategy_name = "hpu_parallel"

    class HPUDDPStrategy(HPUParallelStrategy):
        """HPUParallelStrategy under its newer name."""

        strategy_name = "hpu_ddp"

    made = SingleHPUStrategy, HPUParallelStrategy, HPUDDPStrategy
    for each in made:
        each.__qualname__, each.__module__ = each.__name__, __name__
    return made


# --- what Lightning's Trainer takes ---


def register(module: types.ModuleType, strategies: tuple[Any, ...], replaced: AttributeReplacements) -> None:
    """Register "hpu" and its strategies in the package of that `accelerator_connector`, until `replaced.undo()`."""
    for registry, name, each in (
        (module.AcceleratorRegistry, "hpu", HPUAccelerator),
        *((module.StrategyRegistry, each.strategy_name, each) for each in strategies),
    ):
        if name not in registry:
            registry.register(name, each, description=each.__name__)
            replaced.on_undo(functools.partial(registry.pop, name, None))


def translate(module: types.ModuleType, strategies: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Set the accelerator, strategy and plugin in a Trainer's arguments, where "hpu" implies them."""
    strategy = given["strategy"]
    theirs = getattr(strategy, "_accelerator", None)
    # accelerator="auto" may choose "hpu" if no other argument is for another device
    names = ("auto", *(each.strategy_name for each in strategies))
    is_for_it = strategy in names if isinstance(strategy, str) else isinstance(strategy, strategies)
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
    precision = module._convert_precision_to_unified_args(given["precision"])
    plugins = given["plugins"] or []
    plugins = list(plugins) if isinstance(plugins, Iterable) else [plugins]
    has_plugin = any(isinstance(each, module.Precision) for each in plugins) or getattr(given["strategy"], "_precision_plugin", None)
    if precision not in (None, "32-true") and not has_plugin:
        given["plugins"], given["precision"] = [*plugins, HPUPrecisionPlugin(precision)], None
