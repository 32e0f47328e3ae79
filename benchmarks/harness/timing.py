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
    """Disable garbage collection inside the context, as timeit does."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on the calling thread only, inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Clock:
    """The clock of a step on the CPU, the statistic of a visit's steps, and the least number of steps."""

    now: Callable[[], float]
    choose: Callable[[Sequence[float]], float]
    least: int


# The wall clock, which a user waits for.
WALL = Clock(time.perf_counter, median, 1)
# For one thread and short steps: the thread's processor time, which other processes do not count in, of the fastest step.
OWN = Clock(time.thread_time, min, 5)


def step_seconds(step: Callable[[], object], steps: int, device: str, clock: Clock = WALL) -> float:
    """Return the time of one of `steps` steps, after a few that are not counted; on CUDA the median between two events."""
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
    """Return the number of steps that take `seconds`, by one step's time."""
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronise()
    start = time.perf_counter()
    step()
    synchronise()
    return max(least, min(most, round(seconds / max(time.perf_counter() - start, 1e-6))))
