"""One op at a time, on operands so small that the call is all there is to measure."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import hmp

_low = torch.bfloat16
_x, _w, _b = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)
_xl, _wl, _bl = _x.to(_low), _w.to(_low), _b.to(_low)

# The first ones have nothing to cast, the last ones cast every operand.
CALLS: dict[str, Callable[[], object]] = {
    "linear, all bf16": lambda: F.linear(_xl, _wl, _bl),
    "matmul, all bf16": lambda: torch.matmul(_xl, _wl),
    "@, all bf16": lambda: _xl @ _wl,
    "addmm, all bf16": lambda: torch.addmm(_bl, _xl, _wl),
    "relu, bf16": lambda: F.relu(_xl),
    "layer_norm, bf16": lambda: F.layer_norm(_xl, (8,)),
    "softmax, float32": lambda: F.softmax(_x, -1),
    "add, float32": lambda: torch.add(_x, _x),
    "linear, float32": lambda: F.linear(_x, _w, _b),
    "@, float32": lambda: _x @ _w,
}
SIDES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "plain": contextlib.nullcontext,
    "hmp": hmp.convert,
    "hmp off": lambda: _off(),
    "autocast": lambda: torch.autocast("cpu", dtype=_low),
}


@contextlib.contextmanager
def _off():
    with hmp.convert(), hmp.disable_casts():
        yield


def measure(name: str, rounds: int, calls: int) -> dict[str, float]:
    """Nanoseconds a call on each side: the median over `rounds` interleaved rounds of `calls` calls."""
    call = CALLS[name]
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    with torch.no_grad():
        for _ in range(rounds):
            for side, put_in_force in SIDES.items():
                with put_in_force():
                    call()
                    start = time.perf_counter_ns()
                    for _ in range(calls):
                        call()
                    samples[side].append((time.perf_counter_ns() - start) / calls)
    return {side: statistics.median(times) for side, times in samples.items()}
