"""hmp in Lightning: a precision plugin for Trainer and Fabric, and a callback that logs the device's memory.

Both work with `lightning` and with `pytorch_lightning` (and `lightning_fabric`), which are the same code twice: each checks for its own
classes, so the classes here inherit from those of every installed package. They support releases from 2.1.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hmp

from ..core.active.regions import without_casts
from ..core.policy.entries import VARIABLES
from ..core.policy.policy import DEFAULT, as_policy
from .lightning_packages import installed, preferred, release

__all__ = ["DeviceStats", "HMPPrecision"]


class _Package(NamedTuple):
    """The classes of one of the packages."""

    for_trainer: Any  # the mixed precision of its Trainer
    for_fabric: Any  # that of its Fabric
    LightningModule: Any
    Callback: Any


def _package(name: str) -> _Package:
    pytorch: Any = importlib.import_module(name)
    fabric = "lightning.fabric" if name == "lightning.pytorch" else "lightning_fabric"
    trainers, fabrics = (importlib.import_module(f"{each}.plugins.precision") for each in (name, fabric))
    return _Package(trainers.MixedPrecision, fabrics.MixedPrecision, pytorch.LightningModule, pytorch.Callback)


def _packages() -> list[_Package]:
    """Return the packages to inherit from: both if they have the same release, else the imported or the first one."""
    found = installed("hmp.compat.lightning", (2, 1))
    return [_package(name) for name in found if release(name) == release(preferred(found))]


_PACKAGES = _packages()
_PLUGINS = tuple(dict.fromkeys(plugin for package in _PACKAGES for plugin in (package.for_trainer, package.for_fabric)))
_Plugins: Any = type("_Plugins", _PLUGINS, {})
_Callbacks: Any = type("_Callbacks", tuple(package.Callback for package in _PACKAGES), {})


class HMPPrecision(_Plugins):  # type: ignore[misc]  # the bases are chosen at import
    """A precision plugin that runs the model under a policy: `Trainer(plugins=[HMPPrecision()])`, `Fabric(plugins=[HMPPrecision()])`.

    hmp casts where `precision="bf16-mixed"` enters torch.autocast: in the training, validation, test and predict step, and in calls of a
    module that Fabric has set up, whose outputs become float32. Optimizer steps, gradient clipping, `self.log` and other code run without
    casts. Parameters stay float32, also in checkpoints.

    A Trainer's checkpoint contains the policy, `hmp.Policy.from_dict(checkpoint["HMPPrecision"]["policy"])`. Resuming under another one
    logs a warning. Scoped entries (`softmax @ decoder.*`) apply to the modules of the LightningModule, or of the one module that Fabric
    sets up.

    Args:
        policy: A policy, a preset's name or a folder of lists. None reads the lists that the environment variables LOWER_LIST and FP32_LIST
            name (or PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST and PT_HPU_AUTOCAST_FP32_OPS_LIST), and is "autocast" if they are unset:
            the lists of torch.autocast for the accelerator, or else for the CPU.
        scaler: The loss scaler of a policy whose low-precision dtype is float16; None creates a torch.amp.GradScaler, as
            `precision="16-mixed"` does.
        verify: Record the calls up to the end of the first optimizer step, and raise if one did not follow its list.

    Raises:
        OpListError: The lists cannot be used.
        HmpError: The policy has scoped entries and Fabric has set up no module, or more than one.
        ViolationError: With `verify`, a call did not follow its list.

    Example:
        >>> from hmp.compat.lightning import HMPPrecision
        >>> plugin = HMPPrecision("habana")  # Trainer(plugins=[plugin])
        >>> with plugin.forward_context():
        ...     torch.nn.functional.linear(torch.ones(1, 4), torch.ones(2, 4)).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        policy: hmp.Policy | str | Path | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        verify: bool = False,
    ) -> None:
        if policy is None and any(os.environ.get(each) for variables in VARIABLES.values() for each in variables):
            self.policy = hmp.Policy.from_env()
        else:
            self.policy = as_policy(DEFAULT if policy is None else policy)
        self._to_verify, self._verifying = verify, False
        self._module: Any = None  # the LightningModule that the Trainer runs
        self._scoped: tuple[weakref.ref[torch.nn.Module], Any] | None = None  # the module of the scoped entries, and its context
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cpu" if accelerator is None else accelerator.type
        if self.policy.dtype is torch.float16 and scaler is None:
            scaler = torch.amp.GradScaler(device)
        precision = "16-mixed" if self.policy.dtype is torch.float16 else "bf16-mixed"
        for plugin in _PLUGINS:
            plugin.__init__(self, precision, device, scaler)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Return a context in which the policy is active."""
        with self._verified(), self._region(), _uncast_log(self._module):
            yield

    @contextlib.contextmanager
    def _verified(self) -> Iterator[None]:
        """Verify the calls inside the context, unless it is inside another one or the first optimizer step is done."""
        if not self._to_verify or self._verifying:
            yield
            return
        self._verifying = True
        try:
            with hmp.record() as report:
                yield
        finally:
            self._verifying = False
        if report.violations():
            report.verify()

    def _region(self) -> Any:
        if not self.policy.scoped:
            return hmp.casts(self.policy)
        if self._scoped is None:
            raise hmp.HmpError(
                f"policy {self.policy.name!r} has scoped entries and expected a module, got none yet; call fabric.setup(module) first"
            )
        return self._scoped[1]

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module as it is; scoped entries of the policy are resolved for it."""
        if self.policy.scoped:
            known = None if self._scoped is None else self._scoped[0]()
            if known is not None and known is not module:
                raise hmp.HmpError(
                    f"policy {self.policy.name!r} has scoped entries and expected one model, got a second; pass policy.unscoped to the "
                    "plugin, and call hmp.apply(module, policy) for each model"
                )
            if known is None:
                self._scoped = weakref.ref(module), hmp.casts(self.policy, model=module)
        return module

    def autocast_context_manager(self) -> Any:
        """Return `forward_context()`, under the name in Lightning's mixed precision."""
        return self.forward_context()

    def convert_input(self, data: Any) -> Any:
        """Return the batch as it is: the policy decides for each op which inputs are cast."""
        return data

    def connect(self, model: torch.nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Return the arguments, and store the LightningModule until `teardown`."""
        modules = tuple(package.LightningModule for package in _PACKAGES)
        self._module = next((module for module in model.modules() if isinstance(module, modules)), None)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Release the LightningModule."""
        self._module = self._scoped = None

    # The following methods call the code of the package that the model comes from: lightning would not clip the gradients of a model of
    # pytorch_lightning.

    def pre_backward(self, *given: Any) -> Any:
        """Scale the loss if the low-precision dtype is float16, and call the Trainer's hooks."""
        return _plugin_for(*given).pre_backward(self, *given)

    def backward(self, *given: Any, **kwargs: Any) -> None:
        """Run backward of the loss, without casts."""
        _plugin_for(*given, *kwargs.values()).backward(self, *given, **kwargs)

    def post_backward(self, *given: Any) -> Any:
        """Call the Trainer's hooks."""
        return _plugin_for(*given).post_backward(self, *given)

    def optimizer_step(self, *given: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step without casts; the forward in its closure has a context of its own."""
        with self._verified():
            result = _plugin_for(*given, *kwargs.values()).optimizer_step(self, *given, **kwargs)
        self._to_verify = False
        return result

    def _clip_gradients(self, model: Any, *args: Any, **kwargs: Any) -> None:
        _plugin_for(model)._clip_gradients(self, model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide the gradients by the loss scale; only Fabric calls this."""
        _PACKAGES[0].for_fabric.unscale_gradients(self, optimizer)

    def convert_output(self, data: Any) -> Any:
        """Return the output with floating-point tensors in torch's default dtype; only Fabric calls this."""
        return _PACKAGES[0].for_fabric.convert_output(self, data)

    def state_dict(self) -> dict[str, Any]:
        """Return the policy and the scaler's state, if there is one, as plain values for a checkpoint."""
        state: dict[str, Any] = {"policy": self.policy.to_dict()}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scaler's state, and warn if the saved run had another policy. This plugin keeps its own."""
        if "policy" in state_dict:
            saved = hmp.Policy.from_dict(state_dict["policy"])
            if saved != self.policy:
                warnings.warn(
                    f"expected the checkpoint's {_described(saved)}, got {_described(self.policy)}, so the numbers will differ; to go on "
                    f'as before use HMPPrecision(hmp.Policy.from_dict(checkpoint["{type(self).__qualname__}"]["policy"]))',
                    stacklevel=2,
                )
        if self.scaler is not None and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])


def _described(policy: hmp.Policy) -> str:
    return f"policy {policy.name!r} ({policy.fingerprint})"


def _plugin_for(*given: Any) -> Any:
    """Return the plugin class to call for these arguments: that of the Trainer whose model is among them, or of Fabric."""
    for package in _PACKAGES:
        # a LightningModule that Fabric runs has `fabric` set
        if any(isinstance(each, package.LightningModule) and getattr(each, "fabric", None) is None for each in given):
            return package.for_trainer
    return _PACKAGES[0].for_fabric


@contextlib.contextmanager
def _uncast_log(module: Any) -> Iterator[None]:
    """Run `module.log` without casts inside the context: it averages with `*`, which is on Habana's BF16 list."""
    if module is None or "log" in vars(module):
        yield
        return
    vars(module)["log"] = without_casts(module.log)
    try:
        yield
    finally:
        del vars(module)["log"]


class DeviceStats(_Callbacks):  # type: ignore[misc]  # the bases are chosen at import
    """A callback that logs hmp.memory.memory_stats() of the trainer's device: `Trainer(callbacks=[DeviceStats()])`.

    Every `log_every_n_steps` training batches it logs the device's statistics, in bytes, as "DeviceStats/InUse" and so on. Loggers write
    in the first process: the device is that one's.

    Raises:
        HmpError: The trainer has no logger.

    Example:
        >>> from hmp.compat.lightning import DeviceStats
        >>> callback = DeviceStats()  # Trainer(callbacks=[callback])
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raise HmpError if the trainer has no logger."""
        if not trainer.loggers:
            raise hmp.HmpError("DeviceStats expected a trainer with a logger, got one without; pass Trainer(logger=...)")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log every `log_every_n_steps` batches."""
        if (trainer.fit_loop.total_batch_idx + 1) % trainer.log_every_n_steps:
            return
        device = trainer.strategy.root_device
        # loggers take numbers: statistics that the device does not have are None
        metrics = {f"DeviceStats/{name}": value for name, value in hmp.memory.memory_stats(device).items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
