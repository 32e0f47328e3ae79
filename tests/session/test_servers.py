"""A server whose requests run under different casts: each answer is that of the casts that its request asked for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy

LINEARS = policy(bf16=["linear"])
HALF = policy(bf16=["linear"], dtype=torch.float16)
# what a request asks for → the region that its handler is in, and the dtype of the model's products there
WISHES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], torch.dtype]] = {
    "as the process": (contextlib.nullcontext, torch.bfloat16),
    "off": (hmp.disable_casts, torch.float32),
    "half": (lambda: hmp.casts(HALF), torch.float16),
    "off and on": (lambda: _both(hmp.disable_casts(), hmp.enable_casts()), torch.bfloat16),
    "autocast off": (lambda: torch.autocast("cpu", enabled=False), torch.float32),
}


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Any:
    with one, other:
        yield


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def _explicit(model: Model, x: torch.Tensor, first: torch.dtype, second: torch.dtype) -> str:
    """What `model` answers, by plain torch, when its products are computed in these dtypes."""
    with torch.no_grad():
        hidden = torch.tanh(F.linear(x.to(first), model.up.weight.to(first), model.up.bias.to(first)))
        y = F.linear(hidden.to(second), model.down.weight.to(second), model.down.bias.to(second))
    return f"{y.dtype} {y.tolist()}"


def _input(seed: int) -> torch.Tensor:
    return torch.tensor([((seed * 37 + i * 11) % 19) / 7 - 1 for i in range(8)])[None]


async def _serve(model: Model, requests: list[tuple[str, str, int]], at_once: int = 100) -> list[str]:
    """The answers to the requests, sent over real connections, many at once. A request names its wish, where its model runs, its input."""
    pool = concurrent.futures.ThreadPoolExecutor(3)

    def answer(seed: int) -> str:
        with torch.no_grad():
            y = model(_input(seed))
        return f"{y.dtype} {y.tolist()}"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wish, where, seed = (await reader.readline()).decode().strip().split(";")
        with WISHES[wish][0]():
            await asyncio.sleep(int(seed) % 5 / 1000)  # others are served meanwhile, in this thread
            if where == "loop":
                said = answer(int(seed))
            elif where == "to_thread":  # which hands the context on
                said = await asyncio.to_thread(answer, int(seed))
            else:
                said = await asyncio.get_running_loop().run_in_executor(pool, answer, int(seed))
            await asyncio.sleep(0)
        writer.write(said.encode() + b"\n")
        await writer.drain()
        writer.close()

    async def ask(request: tuple[str, str, int]) -> str:
        async with slots:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(";".join(map(str, request)).encode() + b"\n")
            said = (await reader.readline()).decode().strip()
            writer.close()
            return said

    slots = asyncio.Semaphore(at_once)
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        answers = await asyncio.wait_for(asyncio.gather(*map(ask, requests)), 60)
    pool.shutdown()
    return answers


def _requests(places: list[str]) -> list[tuple[str, str, int]]:
    rng = random.Random(3)
    return [(rng.choice(list(WISHES)), rng.choice(places), seed) for seed in range(80)]


@pytest.mark.parametrize("process", [True, False], ids=["convert", "a region around the server"])
def test_r14_every_request_gets_the_casts_that_it_asked_for(process: bool) -> None:
    model, expected = Model(), []
    requests = _requests(["loop", "to_thread", "executor"] if process else ["loop", "to_thread"])
    for wish, where, seed in requests:
        # a pool's threads know of no region: the process's casts hold there
        dtype = torch.bfloat16 if where == "executor" else WISHES[wish][1]
        expected.append(_explicit(model, _input(seed), dtype, dtype))
    with hmp.convert(policy=LINEARS) if process else hmp.casts(LINEARS):
        answers = asyncio.run(_serve(model, requests))
    assert answers == expected
    assert len({answer.split()[0] for answer in answers}) == 3


def test_a_server_answers_while_one_policy_follows_another() -> None:
    """Each of a model's two products runs under one of the policies: there are nine answers, and no others."""
    model, dtypes = Model(), (torch.bfloat16, torch.float16, torch.float32)
    allowed = {_explicit(model, _input(3), first, second) for first in dtypes for second in dtypes}
    policies = itertools.cycle([LINEARS, HALF, policy(fp32=["linear"])])

    async def main() -> list[str]:
        hmp.convert(policy=next(policies))
        requests = [("as the process", where, 3) for _ in range(60) for where in ("loop", "executor")]
        serving = asyncio.create_task(_serve(model, requests, at_once=6))
        await asyncio.sleep(0)
        while not serving.done():
            await asyncio.to_thread(hmp.convert, policy=next(policies))
            await asyncio.sleep(0.005)
        return await serving

    answers = asyncio.run(main())
    assert set(answers) <= allowed
    assert len(set(answers)) >= 3
