"""The three precisions of the demo: what is put around a whole training, and what around each forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import hmp

POLICY = "habana"


@dataclass(frozen=True)
class Precision:
    """A name for the table, and makers of the two contexts."""

    name: str
    around_training: Callable[[], AbstractContextManager[Any]] = nullcontext
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext


FLOAT32 = Precision("float32")
AUTOCAST = Precision("torch.autocast", around_forward=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
# Process-wide, as the call was published: backward and the optimizer's step run inside it too.
HMP = Precision(f"hmp {POLICY}", around_training=lambda: hmp.convert(policy=POLICY))
PRECISIONS = (FLOAT32, AUTOCAST, HMP)
