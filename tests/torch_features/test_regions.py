"""One region object, entered by many threads and in many ways; and R17: regions that end in any order leave what is open."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import hmp
from thread_kit import in_threads
from trap_kit import policy

BF16, F32 = torch.bfloat16, torch.float32
LISTS, OTHER = policy(bf16=["linear"]), policy(bf16=["tanh"])
x = torch.randn(2, 2)


def in_force() -> str:
    """What is in force here, by what torch computes in."""
    found = F.linear(x, x).dtype, torch.tanh(x).dtype
    return {(BF16, F32): "LISTS", (F32, BF16): "OTHER", (F32, F32): "nothing"}[found]


@pytest.fixture
def converted() -> Iterator[None]:
    with hmp.convert(policy=LISTS):
        yield


@pytest.mark.usefixtures("converted")
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


@pytest.mark.usefixtures("converted")
@pytest.mark.parametrize("given", [3, "x", torch.ones(1), torch.nn.Linear, async_generator])
@pytest.mark.parametrize("region", [hmp.disable_casts, hmp.enable_casts])
def test_what_is_no_function_is_not_decorated(region: Callable[..., object], given: object) -> None:
    name = f"hmp.{region.__name__}()"
    message = f"@{name} expected a function, not a class or async generator, got {given!r}; write `with {name}:`"
    for decorate in (region, region()):
        with pytest.raises(hmp.HmpError, match=re.escape(message)):
            decorate(given)  # type: ignore[operator]
