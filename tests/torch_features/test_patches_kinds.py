"""A generator function stays one while it is patched, and a coroutine function one too."""

from __future__ import annotations

import asyncio
import inspect
import types

import pytest
import torch

import hmp

LOW = torch.bfloat16


def steps(x, *, log):
    """What a generator can be told, and what it says."""
    log.append(("begins", x.dtype))
    try:
        got = yield x.dtype
        while got is not None:
            try:
                got = yield got * 2
            except KeyError as error:
                got = yield ("caught", error.args)
        return "returned"
    finally:
        log.append("ended")


@types.coroutine
def awaited_by_old_hands(x):
    got = yield x.dtype
    return x.dtype, got


async def coroutine(x):
    await asyncio.sleep(0)
    return x.dtype


# so long as they are nobody's ops
PLAIN = {f: types.FunctionType(f.__code__, globals(), f.__name__) for f in (steps, awaited_by_old_hands, coroutine)}


def drive(generator):
    """What it answers to next, send, throw and the end."""
    answers = [next(generator), generator.send(3), generator.throw(KeyError("k")), generator.send(4)]
    with pytest.raises(StopIteration) as end:
        generator.send(None)
    return [*answers, end.value.value]


@pytest.fixture
def registered():
    owner = types.ModuleType("owner")
    for function in PLAIN:
        copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
        setattr(owner, function.__name__, copy)
        hmp.register(owner, function.__name__, "bf16")
    return owner


def test_register_a_generator_is_sent_to_thrown_into_closed_and_returns(registered):
    log, plain_log = [], []
    with hmp.convert():
        assert inspect.isgeneratorfunction(registered.steps)
        answers = drive(registered.steps(torch.ones(1), log=log))
        left = registered.steps(torch.ones(1), log=log)
        next(left)
        left.close()
        left = registered.steps(torch.ones(1), log=log)
        next(left)
        with pytest.raises(ZeroDivisionError):
            left.throw(ZeroDivisionError)
    x = torch.ones(1, dtype=LOW)
    assert answers == drive(steps(x, log=plain_log)) == [LOW, 6, ("caught", ("k",)), 8, "returned"]
    assert log == [("begins", LOW), "ended"] * 3


def test_register_a_coroutine_is_awaited(registered):
    with hmp.convert():
        assert inspect.iscoroutinefunction(registered.coroutine)
        assert asyncio.run(registered.coroutine(torch.ones(1))) is LOW
        old = registered.awaited_by_old_hands(torch.ones(1))
        assert inspect.isawaitable(old)
        assert old.send(None) is LOW
        with pytest.raises(StopIteration) as end:
            old.send("sent")
        assert end.value.value == (LOW, "sent")


def test_an_asynchronous_generator_is_refused():
    """In its steps lists would apply, though it is one op."""

    @hmp.fp32_function
    async def products(x):
        yield (x @ x).dtype

    async def first():
        with hmp.casts("habana"):
            return [each async for each in products(torch.ones(2, 2))]

    with pytest.raises(hmp.HmpError, match="async generator"):
        asyncio.run(first())
