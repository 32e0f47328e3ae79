"""convert() and revert() in one thread while others compute: each op of torch's runs fully under casts or fully as plain torch.

A function that is Python code of many ops, and was called before, may be half cast."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from thread_kit import in_threads
from trap_kit import policy

A, B, V = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6)

# Each is one op: builtins, methods, operators, and functions of torch's that call one builtin.
OPS: dict[str, Callable[[], Any]] = {
    "matmul": lambda: torch.matmul(A, B),
    "@": lambda: A @ B,
    "linear": lambda: F.linear(A, B, V),
    "F.relu": lambda: F.relu(A),
    "*": lambda: A * B,
    "Tensor.softmax": lambda: A.softmax(-1),
    "layer_norm": lambda: F.layer_norm(A, (6,), V, V),
}
POLICIES = ["habana", "torch-cpu", policy(bf16=["add"], fp32=["matmul"]), policy(bf16=["matmul", "relu", "mul"], dtype=torch.float16)]


def _bits(result: torch.Tensor) -> tuple[torch.dtype, str]:
    return result.dtype, repr(result.tolist())


def _allowed() -> dict[str, set[tuple[torch.dtype, str]]]:
    """What each op gives in plain torch and under each policy, with nobody else around."""
    allowed = {name: {_bits(op())} for name, op in OPS.items()}
    for each in POLICIES:
        with hmp.convert(policy=each):
            for name, op in OPS.items():
                allowed[name].add(_bits(op()))
    hmp.revert()
    return allowed


def _convert_and_revert(seconds: float) -> None:
    """One policy after another, back and forth between them and plain torch, a context of this thread's in between."""
    rng, end = random.Random(0), time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(rng.randint(1, 4)):
            hmp.convert(policy=rng.choice(POLICIES))
            time.sleep(rng.random() * 0.01)
        with hmp.casts(rng.choice(POLICIES)):
            time.sleep(rng.random() * 0.01)
        hmp.revert()
        time.sleep(rng.random() * 0.01)


@pytest.mark.slow
def test_every_op_is_fully_patched_or_fully_plain_while_others_convert(torch_differences: Callable[[], list[str]]) -> None:
    allowed, done, seen = _allowed(), threading.Event(), set()

    def call_over_and_over() -> None:
        while not done.is_set():
            for name, op in OPS.items():
                bits = _bits(op())
                assert bits in allowed[name], f"{name} gave neither what plain torch nor what a policy gives: {bits[0]}"
                seen.add((name, bits[0]))

    def convert() -> None:
        try:
            _convert_and_revert(4)
        finally:
            done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        in_threads(lambda role: role(), [convert, *[call_over_and_over] * 4])
    finally:
        sys.setswitchinterval(interval)
    hmp.revert()
    assert torch_differences() == []
    # the race was one: the threads met plain torch and policies
    assert all(len({dtype for name, dtype in seen if name == op}) >= 2 for op in ("matmul", "F.relu")), seen


def test_first_calls_at_once_in_many_threads_are_cast() -> None:
    """A wrapper is made at its first call, whoever calls first."""
    low, wide = policy(bf16={"matmul", "linear", "layer_norm"}), policy(fp32={"matmul", "linear"}, bf16={"softmax"})
    start, seen = threading.Barrier(7), []

    def call() -> None:
        for _ in range(10):
            start.wait(30)
            seen.append([OPS[name]().dtype for name in ("matmul", "@", "linear", "Tensor.softmax")])
            start.wait(30)

    running = [threading.Thread(target=call) for _ in range(6)]
    for thread in running:
        thread.start()
    for turn in range(10):
        with hmp.convert(policy=wide if turn % 2 else low):  # another list each time, otherwise nothing is a first call
            start.wait(30)
            start.wait(30)
        is_low = [False, False, False, True] if turn % 2 else [True, True, True, False]
        assert seen[6 * turn :] == [[torch.bfloat16 if each else torch.float32 for each in is_low]] * 6
    for thread in running:
        thread.join()
