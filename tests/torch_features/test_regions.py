"""Regions: one object entered by many threads, and regions that do not nest.

What has ended is never in force again, in no thread, task or copy of a context. Generators that end at any moment are steps of P4.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from thread_kit import in_thread, in_threads
from trap_kit import policy

BF16, F32 = torch.bfloat16, torch.float32
LISTS = policy(bf16=["linear"], fp32=["softmax"])
OTHER = policy(bf16=["tanh"])
x = torch.randn(2, 2)


def in_force() -> str:
    """What is in force here, by what torch computes in."""
    found = F.linear(x, x).dtype, torch.tanh(x).dtype
    return {(BF16, F32): "LISTS", (F32, BF16): "OTHER", (F32, F32): "nothing"}[found]


@pytest.fixture(autouse=True)
def converted() -> Iterator[None]:
    hmp.convert(policy=LISTS)
    yield
    assert in_force() == "LISTS"
    hmp.revert()
    assert in_force() == "nothing"


def test_one_region_object_in_many_threads_at_once() -> None:
    region, wrong = hmp.disable_casts(), []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for _ in range(200):
            with region:
                if in_force() != "nothing":
                    wrong.append("inside")
                with region, hmp.enable_casts():
                    if in_force() != "LISTS":
                        wrong.append("enabled")
            if in_force() != "LISTS":
                wrong.append("outside")

    in_threads(lambda _: work(), range(4))
    assert not wrong


async def async_generator() -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("given", [3, "x", torch.ones(1), torch.nn.Linear, async_generator])
@pytest.mark.parametrize("region", [hmp.disable_casts, hmp.enable_casts])
def test_what_is_no_function_is_not_decorated(region: Callable[..., object], given: object) -> None:
    name = f"hmp.{region.__name__}()"
    message = f"@{name} expected a function, not a class or async generator, got {given!r}; write `with {name}:`"
    for decorate in (region, region()):
        with pytest.raises(hmp.HmpError, match=re.escape(message)):
            decorate(given)  # type: ignore[operator]


# --- regions that do not nest


def suspended(*regions: Callable[[], Any]) -> Callable[[], Iterator[str]]:
    """A generator that is suspended in these regions, and goes on in them."""

    def generator() -> Iterator[str]:
        with contextlib.ExitStack() as stack:
            for region in regions:
                stack.enter_context(region())
            yield in_force()
            yield in_force()

    return generator


IN_ONE, IN_TWO = suspended(hmp.disable_casts), suspended(lambda: hmp.casts(OTHER), hmp.disable_casts)


@pytest.mark.parametrize("make", [IN_ONE, IN_TWO])
def test_a_region_that_another_thread_ends_ends_where_it_was_entered_and_nowhere_else(make: Any) -> None:
    generator = make()
    next(generator)
    seen: list[str] = []

    def other() -> None:
        with hmp.casts(OTHER):
            generator.close()
            seen.append(in_force())
        seen.append(in_force())

    in_thread(other)
    assert seen == ["OTHER", "LISTS"]
    assert in_force() == "LISTS"


def test_a_copy_of_the_context_keeps_what_it_was_made_in() -> None:
    with hmp.casts(OTHER):
        copied = contextvars.copy_context()
    assert in_force() == "LISTS"
    assert copied.run(in_force) == "OTHER"
    assert in_force() == "LISTS"

    def inside() -> list[str]:
        with hmp.disable_casts():
            seen = [in_force()]
        return [*seen, in_force()]

    assert copied.run(inside) == ["nothing", "OTHER"]
    copies = copied.copy()
    del copied
    assert copies.run(inside) == ["nothing", "OTHER"]
    assert in_force() == "LISTS"


def test_a_task_keeps_what_it_was_started_in_and_a_model_too() -> None:
    seen: dict[str, str] = {}

    async def task(name: str, left: asyncio.Event) -> None:
        await left.wait()
        seen[name] = in_force()
        await asyncio.sleep(0)
        with hmp.disable_casts():
            await asyncio.sleep(0)
        seen[name] += " " + in_force()

    class Starting(torch.nn.Module):
        def forward(self, left: asyncio.Event) -> Any:
            return asyncio.ensure_future(task("call", left))

    model = hmp.apply(Starting(), OTHER)

    async def main() -> None:
        left = asyncio.Event()
        with hmp.casts(OTHER):
            first = asyncio.ensure_future(task("region", left))
        second = model(left)
        assert in_force() == "LISTS"
        left.set()
        await asyncio.gather(first, second)
        assert in_force() == "LISTS"

    asyncio.run(main())
    assert seen == {"region": "OTHER OTHER", "call": "OTHER OTHER"}
