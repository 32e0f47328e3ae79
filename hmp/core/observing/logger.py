"""The logger named "hmp", and which processes of a distributed run write to it."""

from __future__ import annotations

import logging
import os

import torch

log = logging.getLogger("hmp")


def speaks() -> bool:
    """Whether this process logs: rank 0 of a distributed run, or every rank with HMP_LOG_ALL_RANKS=1."""
    if os.environ.get("HMP_LOG_ALL_RANKS") == "1":
        return True
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
