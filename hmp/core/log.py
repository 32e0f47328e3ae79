"""The logger named "hmp", which processes of a distributed run write to it, and the line of the user's code that a message is about."""

from __future__ import annotations

import functools
import logging
import os
import sys
from pathlib import Path

import torch

log = logging.getLogger("hmp")

# The folders of hmp's code and of torch's, which is not the user's.
PACKAGES = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_NOT_THE_USERS = (*PACKAGES, "<")


def should_log() -> bool:
    """Return True if this process logs: rank 0 of a distributed run, or every rank with HMP_LOG_ALL_RANKS=1."""
    if os.environ.get("HMP_LOG_ALL_RANKS") == "1":
        return True
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


@functools.cache
def log_once(text: str, *args: object) -> None:
    """Log a warning, once for the same arguments."""
    if should_log():
        log.warning(text, *args)


def caller() -> tuple[str, int]:
    """Return file and line of the nearest calling frame outside hmp and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
