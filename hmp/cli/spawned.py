"""Processes that a script under ``hmp run`` spawns are under hmp as well.

multiprocessing has each of them run the parent's script again, under the name `__mp_main__`: data loaders with the start methods
spawn and forkserver do, and torch.multiprocessing.spawn(). They run this file instead, which does first what ``hmp run`` did.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
from pathlib import Path
from typing import Any

__all__ = ["pass_on", "run_as_parent_would"]

_VARIABLE = "HMP_RUN"


def pass_on(options: argparse.Namespace) -> None:
    """Has processes that this one spawns do what the options ask for."""
    from multiprocessing import spawn

    values = {name: getattr(options, name) for name in ("policy", "bf16", "fp32", "opt_level", "verbose", "habana", "device_map")}
    for name in ("policy", "bf16", "fp32"):
        if values[name] and os.path.exists(values[name]):
            values[name] = os.path.abspath(values[name])  # the script may change the working directory
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = original(name)
        main = {key: data.pop(key) for key in ("init_main_from_name", "init_main_from_path") if key in data}
        os.environ[_VARIABLE] = json.dumps({**values, **main})
        return {**data, "init_main_from_path": str(Path(__file__).resolve())}

    spawn.get_preparation_data = get_preparation_data


def run_as_parent_would() -> dict[str, Any]:
    """What the parent's script defines, run under hmp as `__mp_main__`."""
    from . import run

    values = json.loads(os.environ[_VARIABLE])
    name, path = values.pop("init_main_from_name", None), values.pop("init_main_from_path", None)
    options = argparse.Namespace(report=None, **values)  # the report is of the process that was started
    run.prepare(options)
    pass_on(options)
    if name is not None and name.rpartition(".")[2] != "__main__":  # as multiprocessing has it
        return runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    if path is not None:
        return runpy.run_path(path, run_name="__mp_main__")
    return {}


if __name__ == "__mp_main__":
    from . import spawned  # what is imported keeps its own names

    globals().update(spawned.run_as_parent_would())
