"""Programs written for Habana's PyTorch run where there is no Gaudi: `install()` makes `habana_frameworks` importable and "hpu" a device.

Nothing of this was run on Gaudi hardware. Where Habana's own package is installed it is used, and this steps aside.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Mapping

import torch

from ...core import fork_safe
from .. import lightning_habana, optimum_habana
from . import compile_backend, device_calls, factories, gaudi_repairs, int32, modules
from .device_map import parse, set_target
from .nothing import forget_said, say_once
from .replacements import IN_PLACE

__all__ = ["Shim", "install", "uninstall"]

_lock = fork_safe.RLock()
_ASIDE = (
    "habana_frameworks is installed here: Habana's own package is used, and hmp's stand-in for it steps aside (only "
    "habana_frameworks.torch.hpex.hmp, which Habana removed in release 1.12, is hmp's); call hmp.compat.habana.install() and "
    "give --habana or --device-map only where it is not installed"
)


class Shim:
    """What `install()` gives back: leaving its `with`, or `.uninstall()`, takes it away again.

    `device` is the device that "hpu" stands for, None for none. `aside` says that Habana's own package is here and is used.
    """

    def __init__(self, device: torch.device | None, aside: bool) -> None:
        self.device = device
        self.aside = aside

    def uninstall(self) -> None:
        """Takes this installation away: what an earlier one set is in force again, or nothing. A second call does nothing."""
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


# The installations that nobody has taken away, latest last; that one's device map is in force.
_installed: list[Shim] = []


def install(device_map: str | Mapping[str, str] | None = "auto") -> Shim:
    """Makes Habana's modules importable and maps the device "hpu", for the whole process; gives back a handle that undoes it.

    `device_map` says where "hpu" lands: "cpu", "cuda", "cuda:1" and the like, "auto" for the accelerator that torch finds and
    else the CPU; "hpu=cpu" and {"hpu": "cpu"} are the same as "cpu"; None maps nothing, and torch.hpu.is_available() is then False.
    Raises HmpError for a device that there is not. Where Habana's own package is installed nothing is done, and the log says so
    once. Works before and after hmp.convert(), and goes away before and after hmp.revert().
    """
    target = parse(device_map)
    with _lock:
        aside = _installed[-1].aside if _installed else modules.is_real()
        shim = Shim(None if aside else target, aside)
        if aside:
            say_once("aside", _ASIDE)
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
    """Takes every installation away: torch and the modules that can be imported are as before the first. Does nothing without one."""
    with _lock:
        _installed.clear()
        set_target(None)
        _take_away()


def _put_in_place(aside: bool) -> None:
    if not aside:
        gaudi_repairs.install(IN_PLACE)
    modules.install(aside)
    if aside:
        return
    hpu: types.ModuleType = importlib.import_module("habana_frameworks.torch.hpu")
    IN_PLACE.put(torch, "hpu", hpu)
    # torch imports it by that name before it makes a tensor on "hpu"
    sys.modules["torch.hpu"] = hpu
    IN_PLACE.on_undo(functools.partial(sys.modules.pop, "torch.hpu", None))
    factories.install(IN_PLACE)
    device_calls.install(IN_PLACE)
    compile_backend.install(IN_PLACE)
    int32.install(IN_PLACE)
    lightning_habana.install(IN_PLACE)
    optimum_habana.install(IN_PLACE)


def _take_away() -> None:
    IN_PLACE.undo()
    modules.uninstall()
    forget_said()
