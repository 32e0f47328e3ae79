"""convert() and revert() in one thread while others compute: each op runs fully under casts or fully as plain torch, and none fails."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy

A, B, V, ONES = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6), torch.ones(6)
POSITIVE, FLIPPED, TARGET = A.abs() + 0.1, A.flip(0), torch.arange(6)

# Each is one op for its caller: builtins, methods, operators, and functions of torch's that are Python code of many ops.
OPS: dict[str, Callable[[], Any]] = {
    "matmul": lambda: torch.matmul(A, B),
    "@": lambda: A @ B,
    "linear": lambda: F.linear(A, B, V),
    "F.relu": lambda: F.relu(A),
    "*": lambda: A * B,
    "Tensor.softmax": lambda: A.softmax(-1),
    "layer_norm": lambda: F.layer_norm(A, (6,), V, V),
    "cross_entropy": lambda: F.cross_entropy(A, TARGET),
    "2.0 /": lambda: 2.0 / POSITIVE,
    "norm": lambda: torch.norm(A, dim=1),
    "einsum": lambda: torch.einsum("ij,jk->ik", A, B),
    "normalize": lambda: F.normalize(A),
    "gaussian_nll_loss": lambda: F.gaussian_nll_loss(A, B, POSITIVE),
    "triplet_margin_with_distance_loss": lambda: F.triplet_margin_with_distance_loss(A, B, FLIPPED),
    "cosine_embedding_loss": lambda: F.cosine_embedding_loss(A, B, ONES),
    "lp_pool1d": lambda: F.lp_pool1d(A, 2.0, 2),
    "softsign": lambda: F.softsign(A),
}
MANY = """truediv norm sub mul add exp sum log softmax matmul bmm linear sqrt square mean clamp_min div pow reciprocal abs relu log_softmax
    einsum tanh sign avg_pool1d lerp""".split()
POLICIES = ["habana", "torch-cpu", policy(bf16=MANY), policy(bf16=["add"], fp32=["matmul", "norm"]), policy(bf16=MANY, dtype=torch.float16)]


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


@contextlib.contextmanager
def threads(work: Callable[[random.Random], None], count: int) -> Iterator[None]:
    """Meanwhile so many threads work, over and over, and take turns as often as they can; raises what one of them raised."""
    done, errors = threading.Event(), []

    def repeat(seed: int) -> None:
        rng = random.Random(seed)
        while not done.is_set() and not errors:
            try:
                work(rng)
            except BaseException as error:
                errors.append(error)

    interval = sys.getswitchinterval()
    started = [threading.Thread(target=repeat, args=(seed,)) for seed in range(count)]
    for thread in started:
        thread.start()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        done.set()
        for thread in started:
            thread.join()
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def _convert_and_revert(seconds: float, seed: int = 0) -> None:
    """One policy after another, back and forth between them and plain torch, regions of this thread's in between."""
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(rng.randint(1, 4)):
            hmp.convert(policy=rng.choice(POLICIES))
            time.sleep(rng.random() * 0.01)
        if rng.random() < 0.3:
            with hmp.casts(rng.choice(POLICIES)):
                time.sleep(rng.random() * 0.01)
        hmp.revert()
        if rng.random() < 0.3:
            with hmp.casts(rng.choice(POLICIES)):
                time.sleep(rng.random() * 0.01)
        time.sleep(rng.random() * 0.01)


def _race(seconds: float, torch_differences: Callable[[], list[str]]) -> None:
    allowed, names = _allowed(), list(OPS)
    seen: dict[str, Counter[torch.dtype]] = {name: Counter() for name in names}

    def work(rng: random.Random) -> None:
        name = rng.choice(names)
        bits = _bits(OPS[name]())
        assert bits in allowed[name], f"{name} gave neither what plain torch nor what a policy gives: {bits[0]}"
        seen[name][bits[0]] += 1

    with threads(work, 4):
        _convert_and_revert(seconds)
    hmp.revert()
    assert torch_differences() == []
    # the race was one: the threads met plain torch and policies
    assert len(seen["matmul"]) >= 2 and len(seen["F.relu"]) >= 2, seen


@pytest.mark.slow
def test_every_op_is_fully_patched_or_fully_plain_while_others_convert(torch_differences: Callable[[], list[str]]) -> None:
    _race(4, torch_differences)


# --- what began before


def test_r13_a_backward_that_began_before_convert_runs_user_python_without_casts() -> None:
    began, seen = threading.Event(), []

    def note(_: object) -> None:
        seen.append((hmp.casts_enabled(), torch.relu(torch.ones(1)).dtype))

    def slowly(_: object) -> None:
        began.set()
        time.sleep(0.3)

    def run() -> None:
        with hmp.convert():
            torch.relu(ONES)  # this thread has met a process-wide policy
        hmp.revert()
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        y.register_hook(note)  # runs second: after the one of what was made of it
        z = y.exp()
        z.register_hook(slowly)
        z.sum().backward()

    running = ThreadPoolExecutor(1).submit(run)
    assert began.wait(60)
    hmp.convert()
    assert torch.relu(ONES).dtype is torch.bfloat16
    running.result()
    assert seen == [(False, torch.float32)]


def test_r15_an_optimizer_step_that_began_before_convert_is_not_cast() -> None:
    began, seen = threading.Event(), []

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            began.set()
            time.sleep(0.3)
            seen.append((torch.ones(1) * 2.0).dtype)

    optimizer = Slow([torch.nn.Parameter(torch.ones(1))])
    running = ThreadPoolExecutor(1).submit(optimizer.step)
    assert began.wait(60)
    hmp.convert()
    assert (torch.ones(1) * 2.0).dtype is torch.bfloat16
    running.result()
    assert seen == [torch.float32]


@pytest.mark.slow
def test_a_conversion_gives_up_waiting_for_a_thread_that_waits_for_it() -> None:
    began, converted = threading.Event(), threading.Event()

    class Waits(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            began.set()
            assert converted.wait(60)
            return super().__torch_function__(function, types, args, kwargs or {})

    running = ThreadPoolExecutor(1).submit(lambda: F.normalize(torch.ones(2, 2).as_subclass(Waits)))
    assert began.wait(60)
    start = time.monotonic()
    hmp.convert()
    assert 1 < time.monotonic() - start < 30
    converted.set()
    running.result()
