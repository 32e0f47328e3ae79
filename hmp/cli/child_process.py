"""Processes that a script under ``hmp run`` spawns are under hmp as well.

multiprocessing has each of them run the parent's script again, under the name `__mp_main__`: data loaders with the start methods
spawn and forkserver do, and torch.multiprocessing.spawn(). They run this file instead, which does first what ``hmp run`` did.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
from typing import Any


def run_as_parent_would() -> dict[str, Any]:
    """Return what the parent's script defines, run under hmp as `__mp_main__`."""
    from . import run

    values = json.loads(os.environ[run.OF_PARENT])
    name, path = values.pop("init_main_from_name", None), values.pop("init_main_from_path", None)
    options = argparse.Namespace(report=None, html=None, **values)  # the report is of the process that was started
    run.prepare(options)
    run.pass_on(options)
    if name is not None and name.rpartition(".")[2] != "__main__":  # as multiprocessing has it
        return runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    if path is not None:
        return runpy.run_path(path, run_name="__mp_main__")
    return {}


if __name__ == "__mp_main__":
    from hmp.cli import child_process  # absolute: multiprocessing runs this file by its path

    globals().update(child_process.run_as_parent_would())
