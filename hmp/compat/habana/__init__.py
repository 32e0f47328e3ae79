"""Programs written for Habana's PyTorch run without a Gaudi: `install()` makes `habana_frameworks` importable and "hpu" a device.

This was not run on Gaudi hardware. Where Habana's own package is installed it is used, and nothing is installed here.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Mapping

import torch

from ...core import locks
from .. import lightning_habana, optimum_habana
from . import backends, device_arguments, int32, modules
from .device_map import parse, set_target
from .no_ops import forget_warnings, warn_once
from .replacements import IN_PLACE

__all__ = ["Shim", "install", "uninstall"]

_lock = locks.RLock()
_ASIDE = (
    "habana_frameworks is installed here, so Habana's own package is used, and --habana, --device-map and hmp.compat.habana.install() have "
    "no effect (hmp provides only habana_frameworks.torch.hpex.hmp, which Habana removed in release 1.12); use them where it is not "
    "installed"
)


class Shim:
    """What `install()` returns: `uninstall()`, or the end of a `with` block, removes the installation.

    Attributes:
        device: The device that "hpu" is mapped to, or None.
        aside: True if Habana's own package is installed and used.

    Example:
        >>> shim = hmp.compat.habana.install("cpu")
        >>> shim.device
        device(type='cpu')
        >>> shim.uninstall()
    """

    def __init__(self, device: torch.device | None, aside: bool) -> None:
        self.device = device
        self.aside = aside

    def uninstall(self) -> None:
        """Remove this installation; an earlier one becomes active again. A second call does nothing."""
        with _lock:
            if self not in _installed:
                return
            _installed.remove(self)
            set_target(_installed[-1].device if _installed else None)
            if not _installed:
                _take_away()

    def __enter__(self) -> Shim:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.uninstall()


# The installations in order. The device map of the last one is active.
_installed: list[Shim] = []


def install(device_map: str | Mapping[str, str] | None = "auto") -> Shim:
    """Make Habana's modules importable and map the device "hpu", for the whole process.

    Works before and after `hmp.convert()`, and can be uninstalled before and after `hmp.revert()`. Where Habana's own package is installed
    nothing is done, and a warning is logged once.

    Args:
        device_map: The device that "hpu" becomes: "cpu", "cuda", "cuda:1" and so on; "auto" for torch's accelerator, else the CPU.
            "hpu=cpu" and {"hpu": "cpu"} are the same as "cpu". None maps nothing: `torch.hpu.is_available()` is False.

    Returns:
        A handle that uninstalls, also a context manager.

    Raises:
        HmpError: The device map is invalid, or this machine has no such device.

    Example:
        >>> with hmp.compat.habana.install("cpu"):
        ...     import habana_frameworks.torch.core as htcore
        ...     torch.ones(2, device="hpu").device
        device(type='cpu')
    """
    target = parse(device_map)
    with _lock:
        aside = _installed[-1].aside if _installed else modules.is_real()
        shim = Shim(None if aside else target, aside)
        if aside:
            warn_once("aside", _ASIDE)
        if not _installed:
            try:
                _put_in_place(aside)
            except BaseException:
                _take_away()
                raise
        _installed.append(shim)
        set_target(shim.device)
        return shim


def uninstall() -> None:
    """Remove every installation: torch and the importable modules are as before the first. Does nothing without one.

    Example:
        >>> shim = hmp.compat.habana.install("cpu")
        >>> hmp.compat.habana.uninstall()
        >>> torch.hpu.is_available()
        Traceback (most recent call last):
        AttributeError: module 'torch' has no attribute 'hpu'
    """
    with _lock:
        _installed.clear()
        set_target(None)
        _take_away()


def _put_in_place(aside: bool) -> None:
    if not aside:
        optimum_habana.keep_torch_unpatched(IN_PLACE)
    modules.install(aside)
    if aside:
        return
    hpu: types.ModuleType = importlib.import_module("habana_frameworks.torch.hpu")
    IN_PLACE.put(torch, "hpu", hpu)
    # torch imports it by that name before it makes a tensor on "hpu"
    sys.modules["torch.hpu"] = hpu
    IN_PLACE.on_undo(functools.partial(sys.modules.pop, "torch.hpu", None))
    device_arguments.install(IN_PLACE)
    backends.install_compiler(IN_PLACE)
    int32.install(IN_PLACE)
    lightning_habana.install(IN_PLACE)
    optimum_habana.install(IN_PLACE)


def _take_away() -> None:
    IN_PLACE.undo()
    modules.uninstall()
    forget_warnings()
