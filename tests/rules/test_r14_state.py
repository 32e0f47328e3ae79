"""R14: whether casts are on is the business of one thread or task; it decorates, and replicas inherit it.

Whatever is open in threads and tasks, P4 asks (tests/properties).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
import threading

import pytest
import torch

import hmp
from autocast_kit import real_state
from trap_kit import policy

LOW, WIDE = torch.bfloat16, torch.float32


def seen() -> torch.dtype:
    """The dtype that a listed op gives here; the answer of casts_enabled() must agree."""
    dtype = torch.relu(torch.ones(1)).dtype
    assert hmp.casts_enabled() == (dtype == LOW)
    return dtype


@pytest.fixture
def casting():
    with hmp.casts("habana"):
        yield


DECORATE = pytest.mark.parametrize("decorate", [hmp.disable_casts, hmp.disable_casts()], ids=["bare", "called"])


@DECORATE
def test_r14_it_decorates_functions_and_methods(casting, decorate):
    @decorate
    def function(a, *, b=2):
        """Docs."""
        return seen(), a, b

    class Holder:
        @decorate
        def method(self):
            return seen(), self

        static = decorate(staticmethod(lambda: seen()))
        of_class = decorate(classmethod(lambda cls: seen()))

        def __call__(self, *args):
            return seen(), args

    holder = Holder()
    assert function(1, b=3) == (WIDE, 1, 3)
    assert (function.__name__, function.__doc__, list(inspect.signature(function).parameters)) == ("function", "Docs.", ["a", "b"])
    assert holder.method() == (WIDE, holder) and Holder.static() == holder.static() == Holder.of_class() == WIDE
    assert decorate(holder)(1) == (WIDE, (1,))
    assert decorate(functools.partial(functools.partial(holder, 1), 2))(3) == (WIDE, (1, 2, 3))
    assert decorate(decorate(functools.partial(holder.method)))() == (WIDE, holder)
    assert seen() == LOW


@DECORATE
def test_r14_it_decorates_generators(casting, decorate):
    @decorate
    def generator():
        try:
            received = yield seen()
            try:
                yield received, seen()
            except KeyError:
                yield seen()
            return seen()
        finally:
            closed.append(seen())

    closed: list[torch.dtype] = []
    steps = generator()
    assert inspect.isgeneratorfunction(inspect.unwrap(generator))
    assert next(steps) == WIDE and seen() == LOW
    assert steps.send("x") == ("x", WIDE) and seen() == LOW
    assert steps.throw(KeyError()) == WIDE and seen() == LOW
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == WIDE and seen() == LOW and closed == [WIDE]
    steps = generator()
    next(steps)
    steps.close()
    assert closed == [WIDE, WIDE] and seen() == LOW


@DECORATE
def test_r14_it_decorates_coroutines(casting, decorate):
    @decorate
    async def coroutine(n):
        first = seen()
        await asyncio.sleep(0)
        return n, first, seen()

    async def main():
        assert await coroutine(1) == (1, WIDE, WIDE)
        return await asyncio.gather(*(coroutine(n) for n in range(5)))

    # asyncio.run copies this thread's context, casts included
    assert [n for n, *_ in asyncio.run(main())] == list(range(5))
    assert seen() == LOW


@pytest.fixture
def replicas(monkeypatch):
    """torch's parallel_apply on CPU tensors: it asks for an accelerator and its streams, so it gets one that does nothing."""

    def accelerated(*args):
        return contextlib.nullcontext()

    if "torch.accelerator" not in inspect.getsource(torch.nn.parallel.parallel_apply):
        pytest.skip("the parallel_apply of this torch asks for CUDA by name")
    for name in ("current_stream", "device_index"):
        monkeypatch.setattr(torch.accelerator, name, accelerated)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(sys.modules["torch.nn.parallel.parallel_apply"], "_get_device_index", lambda device, optional: device)

    class Seen(torch.nn.Module):
        def forward(self, x):
            threads.add(threading.get_ident())
            assert real_state() == off  # R17: the casts are handed on, and torch.autocast's state is not made of them
            return torch.relu(x)

    threads: set[int] = set()
    off = real_state()

    def apply() -> set[torch.dtype]:
        outputs = torch.nn.parallel.parallel_apply([Seen(), Seen(), Seen()], [(torch.ones(1),)] * 3, devices=[0, 1, 2])
        assert threading.get_ident() not in threads
        return {output.dtype for output in outputs}

    return apply


def test_r14_replica_threads_inherit_the_callers_state(replicas):
    around = {
        hmp.disable_casts: WIDE,
        lambda: hmp.casts(policy(bf16=["mm"])): WIDE,
        lambda: hmp.casts(policy(bf16=["relu"], dtype=torch.float16)): torch.float16,
        lambda: torch.autocast("cpu", enabled=False): WIDE,
    }
    assert replicas() == {WIDE}
    for process in (hmp.convert, lambda: hmp.casts("habana")):
        with process():
            assert replicas() == {LOW}
            for region, dtype in around.items():
                with region():
                    assert replicas() == {dtype}
            with hmp.disable_casts(), hmp.enable_casts():
                assert replicas() == {LOW}
    assert replicas() == {WIDE}
