"""How each script here runs under torchrun: `SCRIPT OUTPUT SECONDS NAMES ...`, where names are separated by semicolons.

Each rank writes OUTPUT.RANK in JSON. One that is not done after so many seconds prints where every thread of it stands, and dies.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def measured(measure: Callable[..., Any]) -> None:
    """Writes down what `measure` finds, given each of the lists of names, and ends the process."""
    output, seconds, *names = sys.argv[1:]
    faulthandler.enable()  # a rank that crashes says where
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(seconds)))
    found = measure(*(each.split(";") for each in names))
    with open(f"{output}.{dist.get_rank()}", "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Python's end may abort where threads of gloo's wait for the GIL (see leave() of tests/compat/ddp_run.py)
