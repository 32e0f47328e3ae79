"""What user Python in backward finds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import hmp
from oracle import BF16, F32


class Seen:
    """What user Python finds: whether casts are on, and what listed ops give, a method, an operator and a function among them."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def note(self, *_: object) -> None:
        wide, low = torch.ones(2, 2), torch.ones(2, 2, dtype=BF16)
        made = torch.matmul(wide, wide), wide * 2, F.softmax(low, -1), low.log(), F.linear(wide, wide)
        self.notes.append((hmp.casts_enabled(), *(t.dtype for t in made)))

    def assert_without_lists(self, times: int) -> None:
        assert self.notes == [(False, F32, F32, BF16, BF16, F32)] * times, self.notes
