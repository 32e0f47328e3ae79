"""hmp in Lightning: a precision plugin for Trainer and Fabric, and a callback that logs the device's memory.

Both work with `lightning` and with `pytorch_lightning` (and `lightning_fabric`), which are the same code twice: each checks
for its own classes. So the classes here inherit from those of every package that is installed. The oldest are the Trainer of 1.6 and the
Fabric of 2.0.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hmp

from ..core.active import without_casts
from ..core.policy import DEFAULT, as_policy, names_lists
from ..tools.report.violations import check_allowed
from .lightning_homes import installed, preferred, release

__all__ = ["DeviceStats", "HMPPrecision"]


class _Home(NamedTuple):
    """What one of the packages has."""

    for_trainer: Any  # the mixed precision of its Trainer
    for_fabric: Any  # that of its Fabric; before 2.0 the Trainer's
    LightningModule: Any
    Callback: Any


def _home(name: str) -> _Home:
    pytorch: Any = importlib.import_module(name)
    trainers: Any = importlib.import_module(f"{name}.plugins.precision")
    if release(name) < (2, 0):
        amp = trainers.MixedPrecisionPlugin if release(name) == (1, 9) else trainers.NativeMixedPrecisionPlugin
        return _Home(amp, amp, pytorch.LightningModule, pytorch.Callback)
    fabric = "lightning.fabric" if name == "lightning.pytorch" else "lightning_fabric"
    fabrics: Any = importlib.import_module(f"{fabric}.plugins.precision")
    amp = trainers.MixedPrecisionPlugin if release(name) == (2, 0) else trainers.MixedPrecision
    return _Home(amp, fabrics.MixedPrecision, pytorch.LightningModule, pytorch.Callback)


def _homes() -> list[_Home]:
    """The packages whose classes these inherit from: both, if they are of one release, and else the one that is imported, or the first."""
    chosen = preferred(_WHO)
    return [_home(name) for name in installed(_WHO) if release(name) == release(chosen)]


_WHO = "hmp.compat.lightning"
_IS_OLD = release(preferred(_WHO)) < (2, 0)
_HOMES = _homes()
_PLUGINS = tuple(dict.fromkeys(plugin for home in _HOMES for plugin in (home.for_trainer, home.for_fabric)))
_Plugins: Any = type("_Plugins", _PLUGINS, {})
_Callbacks: Any = type("_Callbacks", tuple(home.Callback for home in _HOMES), {})


class HMPPrecision(_Plugins):  # type: ignore[misc]  # its bases are known when it is imported
    """A precision plugin that runs the model under an hmp policy: `Trainer(plugins=[HMPPrecision()])`, `Fabric(plugins=[...])`.

    `policy` is an hmp.Policy, a preset's name or a folder. Without one it is what LOWER_LIST and FP32_LIST name
    (or PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST and PT_HPU_AUTOCAST_FP32_OPS_LIST) when the plugin is made, and "autocast" where
    they are unset: torch.autocast's own lists for the accelerator that there is, else for the CPU.

    Casts are in force where `precision="bf16-mixed"` has torch.autocast: in the training, validation, test and predict step,
    and in the calls of a module that Fabric has set up, whose outputs become float32. They are not in optimizer steps,
    gradient clipping, `self.log`, or anywhere else in the process. Parameters stay float32, in checkpoints too. A Trainer's
    checkpoint holds the policy, `hmp.Policy.from_dict(checkpoint["HMPPrecision"]["policy"])`, and resuming under another
    one warns.

    With `verify` the calls up to the end of the first optimizer step are recorded, and hmp.ViolationError is raised where one ran otherwise
    than the line of its list says; `allow` is as for hmp.verify().

    A policy whose low dtype is float16 scales the loss, by `scaler` or a torch.amp.GradScaler, as `precision="16-mixed"` does.
    Scoped lines (`softmax @ decoder.*`) speak of the modules of the LightningModule, or of the one module that Fabric sets up.
    Raises OpListError for lists that cannot be used.
    """

    def __init__(
        self,
        policy: hmp.Policy | str | Path | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        verify: bool = False,
        allow: Collection[str] = (),
    ) -> None:
        if policy is None and names_lists(os.environ):
            self.policy = hmp.Policy.from_env()
        else:
            self.policy = as_policy(DEFAULT if policy is None else policy)
        check_allowed(allow)
        self._to_verify, self._verifying, self._allow = verify, False, allow
        self._module: Any = None  # the LightningModule that the Trainer runs
        self._scoped: tuple[weakref.ref[torch.nn.Module], Any] | None = None  # the module that scoped lines speak of, and its region
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cpu" if accelerator is None else accelerator.type
        if self.policy.dtype is torch.float16 and scaler is None:
            scaler = torch.amp.GradScaler(device)
        is_half = self.policy.dtype is torch.float16
        precision: str | int = ("16-mixed" if is_half else "bf16-mixed") if not _IS_OLD else (16 if is_half else "bf16")
        for plugin in _PLUGINS:
            plugin.__init__(self, precision, device, scaler)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """A region in which the policy is in force."""
        with self._verified(), self._region(), _uncast_log(self._module):
            yield

    @contextlib.contextmanager
    def _verified(self) -> Iterator[None]:
        """A recording that must show nothing but calls as the lists say; nothing inside another one, and after the first optimizer step."""
        if not self._to_verify or self._verifying:
            yield
            return
        self._verifying = True
        try:
            with hmp.record() as report:
                yield
        finally:
            self._verifying = False
        if report.violations() or any(row.source for row in report.rows):
            report.verify(self._allow)

    def _region(self) -> Any:
        if not self.policy.scoped:
            return hmp.casts(self.policy)
        if self._scoped is None:
            raise hmp.HmpError(
                f"policy {self.policy.name!r} has scoped lines, and there is no module yet that they could speak of; "
                "call fabric.setup(module) first"
            )
        return self._scoped[1]

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """`module` as it is; scoped lines of the policy are resolved for it."""
        if self.policy.scoped:
            known = None if self._scoped is None else self._scoped[0]()
            if known is not None and known is not module:
                raise hmp.HmpError(
                    f"policy {self.policy.name!r} has scoped lines, which speak of one model, and this is the second that is "
                    "set up; give the plugin policy.unscoped, and call hmp.apply(module, policy) for each"
                )
            if known is None:
                self._scoped = weakref.ref(module), hmp.casts(self.policy, model=module)
        return module

    def autocast_context_manager(self) -> Any:
        """The region of `forward_context`, under the name that Lightning's mixed precision has for it."""
        return self.forward_context()

    def convert_input(self, data: Any) -> Any:
        """`data` as it is: which inputs are cast is for the ops that get them to say."""
        return data

    def connect(self, model: torch.nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """What it is given; the LightningModule in it is remembered until `teardown`."""
        modules = tuple(home.LightningModule for home in _HOMES)
        self._module = next((module for module in model.modules() if isinstance(module, modules)), None)
        if self._module is not None and self._scoped is None:
            self.convert_module(self._module)  # releases before 2.1 do not ask for it
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Lets go of the LightningModule."""
        self._module = self._scoped = None

    # What follows goes to the package that the model comes from: lightning's code takes a model of pytorch_lightning for none
    # of its own and would not clip its gradients. 1.6 and 1.7 give the model first, later ones the loss or the optimizer.

    def pre_backward(self, *given: Any) -> Any:
        """Scales the loss where the low dtype is float16, and calls the Trainer's hooks."""
        return _plugin_for(*given).pre_backward(self, *given)

    def backward(self, *given: Any, **kwargs: Any) -> None:
        """Backward of the loss, without casts."""
        _plugin_for(*given, *kwargs.values()).backward(self, *given, **kwargs)

    def post_backward(self, *given: Any) -> Any:
        """Calls the Trainer's hooks."""
        return _plugin_for(*given).post_backward(self, *given)

    def optimizer_step(self, *given: Any, **kwargs: Any) -> Any:
        """The optimizer's step, without casts; a closure runs the forward in a context of its own."""
        with self._verified():
            result = _plugin_for(*given, *kwargs.values()).optimizer_step(self, *given, **kwargs)
        self._to_verify = False
        return result

    def _clip_gradients(self, model: Any, *args: Any, **kwargs: Any) -> None:
        _plugin_for(model)._clip_gradients(self, model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Takes the scale out of the gradients; only Fabric asks."""
        _HOMES[0].for_fabric.unscale_gradients(self, optimizer)

    def convert_output(self, data: Any) -> Any:
        """`data` with its floating tensors in torch's default dtype; only Fabric asks."""
        return _HOMES[0].for_fabric.convert_output(self, data)

    def state_dict(self) -> dict[str, Any]:
        """The policy, and the scaler's state where there is one: plain values, for a checkpoint."""
        state: dict[str, Any] = {"policy": self.policy.to_dict()}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the scaler; warns where the run that was saved had another policy. This plugin keeps its own."""
        if "policy" in state_dict:
            saved = hmp.Policy.from_dict(state_dict["policy"])
            if saved != self.policy:
                warnings.warn(
                    f"the checkpoint was written under {_described(saved)}, and this run goes on under {_described(self.policy)}; "
                    f'to go on as before give HMPPrecision(hmp.Policy.from_dict(checkpoint["{type(self).__qualname__}"]["policy"]))',
                    stacklevel=2,
                )
        if self.scaler is not None and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])


def _described(policy: hmp.Policy) -> str:
    return f"policy {policy.name!r} ({policy.fingerprint})"


def _plugin_for(*given: Any) -> Any:
    """The class whose code a call with these is for: that of the Trainer whose model is among them, or of Fabric."""
    for home in _HOMES:
        # Fabric runs LightningModules too, and tells them so
        if any(isinstance(each, home.LightningModule) and getattr(each, "fabric", None) is None for each in given):
            return home.for_trainer
    return _HOMES[0].for_fabric


@contextlib.contextmanager
def _uncast_log(module: Any) -> Iterator[None]:
    """A stretch in which `module.log` runs without casts: it averages with `*`, which Habana's list has in bfloat16."""
    if module is None or "log" in vars(module):
        yield
        return
    vars(module)["log"] = without_casts(module.log)
    try:
        yield
    finally:
        del vars(module)["log"]


class DeviceStats(_Callbacks):  # type: ignore[misc]  # its bases are known when it is imported
    """A callback that logs hmp.memory_stats() of the trainer's device: `Trainer(callbacks=[DeviceStats()])`.

    Every `log_every_n_steps` training batches it gives the trainer's loggers the statistics that the device has, as
    "DeviceStats/InUse" and so on, and Optimum's three numbers as "DeviceStats/memory_allocated (GB)" and so on. Loggers write
    in the first process, so the device is that one's. HmpError where the trainer has no logger.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses a trainer without a logger."""
        if not trainer.loggers:
            raise hmp.HmpError("DeviceStats logs to the trainer's logger, and there is none; give Trainer(logger=...) one")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs, if it is time to."""
        if (trainer.fit_loop.total_batch_idx + 1) % trainer.log_every_n_steps:
            return
        device = trainer.strategy.root_device
        stats: dict[str, float | None] = {**hmp.memory_stats(device)}
        stats |= {f"{name} (GB)": size for name, size in self.gigabytes(device).items()}
        # a logger takes numbers; what the device does not say is not logged
        told = {f"DeviceStats/{name}": value for name, value in stats.items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(told, step=trainer.global_step)

    @staticmethod
    def gigabytes(device: torch.device | str | int) -> dict[str, float | None]:
        """memory_allocated, max_memory_allocated and total_memory_available of `device`, in GB as Optimum has them."""
        return hmp.memory_stats(device, gigabytes=True)
