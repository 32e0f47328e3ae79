"""Processes that Lightning starts by running the script's command line again are under hmp as well.

Its launcher of subprocesses, which `strategy="ddp"` takes, writes that command anew from `sys.executable` and `sys.argv`.
"""

from __future__ import annotations

import functools
import subprocess
import types
from collections.abc import Callable
from typing import Any

from ..compat.import_finders import after_import

_LAUNCHERS = tuple(
    f"{home}.strategies.launchers.subprocess_script"
    for home in ("lightning.fabric", "lightning_fabric", "lightning.lite", "lightning_lite", "pytorch_lightning")
)


def pass_on(values: dict[str, Any]) -> None:
    """Has them run under ``hmp run`` with these options: names as in the parsed command line, None and False for those not given."""
    options: list[str] = []
    for name, value in values.items():
        if value not in (None, False):
            options.append("--" + name.replace("_", "-"))
            options += [] if value is True else [str(value)]

    def under_hmp(command: list[str]) -> list[str]:
        return [command[0], "-m", "hmp", "run", *options, *command[1:]]

    for name in _LAUNCHERS:
        after_import(name, functools.partial(_replace, under_hmp))


def _replace(under_hmp: Callable[[list[str]], list[str]], launcher: types.ModuleType) -> None:
    if launcher.__name__.startswith("pytorch_lightning."):
        if not hasattr(launcher, "_basic_subprocess_cmd"):  # later ones have it from the others, with hmp's command
            vars(launcher)["subprocess"] = types.SimpleNamespace(Popen=functools.partial(_start, under_hmp))
        return
    basic: Callable[..., list[str]] = launcher._basic_subprocess_cmd
    hydra: Callable[..., tuple[list[str], Any]] = launcher._hydra_subprocess_cmd

    @functools.wraps(basic)
    def basic_command() -> list[str]:
        return under_hmp(basic())

    @functools.wraps(hydra)
    def hydra_command(local_rank: int) -> tuple[list[str], Any]:
        command, folder = hydra(local_rank=local_rank)
        return under_hmp(command), folder

    # Lightning's Trainer takes them from here by name when it is imported, which is after this
    vars(launcher).update(_basic_subprocess_cmd=basic_command, _hydra_subprocess_cmd=hydra_command)


def _start(under_hmp: Callable[[list[str]], list[str]], command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
    """Popen for Lightning 1.6 and 1.7, which write the command and start it in one function."""
    return subprocess.Popen(under_hmp(command), **kwargs)
