"""The line of the user's code that a call comes from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

# The folders of hmp's code and of torch's, which is not the user's.
PACKAGES = (str(Path(__file__).parents[2]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_NOT_THE_USERS = (*PACKAGES, "<")


def caller() -> tuple[str, int]:
    """File and line of the nearest calling frame outside hmp and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
