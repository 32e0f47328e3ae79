"""The amount to measure: the smallest run, which checks that everything works, the quick one, and the full one."""

from __future__ import annotations

from dataclasses import dataclass

from ..workloads.models import SIZES


@dataclass(frozen=True)
class Scale:
    """Rounds, sizes and counts of every part."""

    call_rounds: int
    calls: int
    sizes: tuple[str, ...]
    rounds: dict[str, int]  # of steps, by size
    seconds: float  # that a task fills in a visit
    gradient_sizes: tuple[str, ...]
    seeds: int
    optimizer_rounds: int
    narrow_rounds: int
    reused_rounds: int
    processes: int
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    depth_rounds: int
    compiled: tuple[int, int]  # blocks and their width
    compiled_rounds: int
    warm_rounds: int
    recording_rounds: int
    saved_widths: tuple[int, ...]
    saved_rounds: int
    low_rounds: int


SMALLEST = Scale(
    call_rounds=1,
    calls=20,
    sizes=("tiny",),
    rounds=dict.fromkeys(SIZES, 1),
    seconds=0.0,
    gradient_sizes=("tiny",),
    seeds=1,
    optimizer_rounds=1,
    narrow_rounds=1,
    reused_rounds=1,
    processes=1,
    depths=(2, 4),
    widths=(16, 32),
    depth_rounds=1,
    compiled=(1, 16),
    compiled_rounds=1,
    warm_rounds=1,
    recording_rounds=1,
    saved_widths=(32,),
    saved_rounds=1,
    low_rounds=1,
)
QUICK = Scale(
    call_rounds=25,
    calls=800,
    sizes=SIZES,
    rounds={"tiny": 7, "small": 5, "medium": 5},
    seconds=0.02,
    gradient_sizes=("tiny",),
    seeds=7,
    optimizer_rounds=7,
    narrow_rounds=9,
    reused_rounds=7,
    processes=5,
    depths=(2, 8, 32, 96),
    widths=(16, 64, 256),
    depth_rounds=5,
    compiled=(1, 128),
    compiled_rounds=15,
    warm_rounds=7,
    recording_rounds=3,
    saved_widths=(256, 512),
    saved_rounds=3,
    low_rounds=5,
)
FULL = Scale(
    call_rounds=41,
    calls=3000,
    sizes=SIZES,
    rounds={"tiny": 31, "small": 21, "medium": 11},
    seconds=0.1,
    gradient_sizes=SIZES,
    seeds=11,
    optimizer_rounds=21,
    narrow_rounds=31,
    reused_rounds=15,
    processes=15,
    depths=(2, 4, 8, 16, 32, 64, 96),
    widths=(16, 32, 64, 128, 256, 512),
    depth_rounds=15,
    compiled=(4, 256),
    compiled_rounds=31,
    warm_rounds=21,
    recording_rounds=11,
    saved_widths=(256, 512),
    saved_rounds=9,
    low_rounds=11,
)
