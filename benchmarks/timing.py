"""A step's time: wall clock on the CPU, events of the device on CUDA, both after everything queued has run."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
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


def step_seconds(step: Callable[[], object], steps: int, device: str) -> float:
    """The median time of one of `steps` steps, after one that is not counted."""
    step()
    with no_garbage_collection():
        return _on_cuda(step, steps) if device == "cuda" else _on_cpu(step, steps)


def _on_cpu(step: Callable[[], object], steps: int) -> float:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return median(times)


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


def steps_for(seconds: float, step: Callable[[], object], most: int = 60) -> int:
    """How many steps fill `seconds`, by one step's time: at least 1."""
    start = time.perf_counter()
    step()
    return max(1, min(most, round(seconds / max(time.perf_counter() - start, 1e-6))))
