"""What hmp reads of torch that torch does not promise, and which release it is."""

from __future__ import annotations

import re

import torch


def release(text: str) -> tuple[int, ...]:
    """(2, 13) for "2.13.0+cpu" and for "torch-cpu@2.13"."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0)


TORCH = release(torch.__version__)
