"""What user Python in backward finds, on whatever device's thread it runs."""

from __future__ import annotations

import torch

import hmp
from python_device import on_main_thread


class Seen:
    """What user Python in backward finds: notes the thread, whether casts are on, and what a listed op gives."""

    def __init__(self) -> None:
        self.notes: list[tuple[bool, bool, torch.dtype]] = []

    def note(self, *_: object) -> None:
        x = torch.ones(2, 2)
        self.notes.append((on_main_thread(), hmp.casts_enabled(), torch.matmul(x, x).dtype))

    def assert_without_casts(self, times: int) -> None:
        assert self.notes == [(False, False, torch.float32)] * times, self.notes
