"""A step's time: wall clock on the CPU, events of the device on CUDA, both after everything queued has run."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps the collector out of a timed stretch, as timeit does."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Clock:
    """What is read around a step on the CPU, which of a visit's steps stands for it, and how many there are at least."""

    now: Callable[[], float]
    choose: Callable[[Sequence[float]], float]
    least: int


# What a user waits for.
WALL = Clock(time.perf_counter, median, 1)
# For one thread and short steps: the thread's own processor time, which others take no part in, of the least disturbed step.
OWN = Clock(time.thread_time, min, 5)


def step_seconds(step: Callable[[], object], steps: int, device: str, clock: Clock = WALL) -> float:
    """The time of one of `steps` steps, after a few that are not counted; on CUDA the median between two events."""
    for _ in range(1 + steps // 4):
        step()
    with no_garbage_collection():
        return _on_cuda(step, steps) if device == "cuda" else _on_cpu(step, steps, clock)


def _on_cpu(step: Callable[[], object], steps: int, clock: Clock) -> float:
    times = []
    now = clock.now
    for _ in range(steps):
        start = now()
        step()
        times.append(now() - start)
    return clock.choose(times)


def _on_cuda(step: Callable[[], object], steps: int) -> float:
    torch.cuda.synchronize()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(steps)]
    for start, end in pairs:
        # a step begins with an empty queue, so that the time of launching it counts
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairs) / 1000


def steps_for(seconds: float, step: Callable[[], object], device: str, least: int = 1, most: int = 60) -> int:
    """How many steps fill `seconds`, by one step's time."""
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronise()
    start = time.perf_counter()
    step()
    synchronise()
    return max(least, min(most, round(seconds / max(time.perf_counter() - start, 1e-6))))
