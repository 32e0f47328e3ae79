"""A server whose requests run under different casts: each answer is that of the casts that its request asked for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import hmp
from trap_kit import policy

LINEARS = policy(bf16=["linear"])
HALF = policy(bf16=["linear"], dtype=torch.float16)


@contextlib.contextmanager
def _off_and_on() -> Any:
    with hmp.disable_casts(), hmp.enable_casts():
        yield


# what a request asks for → the region that its handler is in, and the dtype of the model's products there
WISHES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], torch.dtype]] = {
    "as the process": (contextlib.nullcontext, torch.bfloat16),
    "off": (hmp.disable_casts, torch.float32),
    "half": (lambda: hmp.casts(HALF), torch.float16),
    "off and on": (_off_and_on, torch.bfloat16),
    "autocast off": (lambda: torch.autocast("cpu", enabled=False), torch.float32),
}


async def _serve(model: torch.nn.Module, requests: list[tuple[str, str]]) -> list[str]:
    """The dtypes of the answers to the requests, sent over real connections, all at once. A request names its wish and where its model
    runs."""
    pool = concurrent.futures.ThreadPoolExecutor(3)
    arrived = 0

    def answer() -> str:
        with torch.no_grad():
            return str(model(torch.ones(1, 4)).dtype)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        wish, where = (await reader.readline()).decode().strip().split(";")
        arrived += 1
        with WISHES[wish][0]():
            await asyncio.sleep(arrived % 5 / 1000)  # others are served meanwhile, in this thread
            if where == "loop":
                said = answer()
            elif where == "to_thread":  # which hands the context on
                said = await asyncio.to_thread(answer)
            else:
                said = await asyncio.get_running_loop().run_in_executor(pool, answer)
            await asyncio.sleep(0)
        writer.write(said.encode() + b"\n")
        await writer.drain()
        writer.close()

    async def ask(request: tuple[str, str]) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(";".join(request).encode() + b"\n")
        said = (await reader.readline()).decode().strip()
        writer.close()
        return said

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        answers = await asyncio.wait_for(asyncio.gather(*map(ask, requests)), 60)
    pool.shutdown()
    return answers


@pytest.mark.parametrize("process", [True, False], ids=["convert", "a region around the server"])
def test_r14_every_request_gets_the_casts_that_it_asked_for(process: bool) -> None:
    rng, places = random.Random(3), ["loop", "to_thread", "executor"] if process else ["loop", "to_thread"]
    requests = [(rng.choice(list(WISHES)), rng.choice(places)) for _ in range(50)]
    # a pool's threads know of no region: the process's casts hold there
    expected = [str(torch.bfloat16 if where == "executor" else WISHES[wish][1]) for wish, where in requests]
    assert len(set(expected)) == 3
    with hmp.convert(policy=LINEARS) if process else hmp.casts(LINEARS):
        assert asyncio.run(_serve(torch.nn.Linear(4, 4), requests)) == expected
