"""Which torch this is, and which ones hmp was run with."""

from __future__ import annotations

import re

import torch

# The releases of torch that all default tests were run with: docs/releases/versions.json.
RELEASES_RUN = ("2.7.1", "2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0")


def release(text: str) -> tuple[int, ...]:
    """Major and minor version in `text`: (2, 13) for "2.13.0+cpu" and for "torch-cpu@2.13"; (0, 0) without one."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0)


TORCH = release(torch.__version__)
