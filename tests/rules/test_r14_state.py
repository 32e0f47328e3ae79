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
import types
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

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

        static = staticmethod(decorate(lambda: seen()))

    holder = Holder()
    assert function(1, b=3) == (WIDE, 1, 3)
    assert (function.__name__, function.__doc__, list(inspect.signature(function).parameters)) == ("function", "Docs.", ["a", "b"])
    assert holder.method() == (WIDE, holder) and Holder.static() == WIDE
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
def test_r14_it_decorates_coroutines_and_async_generators(casting, decorate):
    @decorate
    async def coroutine(n):
        first = seen()
        await asyncio.sleep(0)
        return n, first, seen()

    @decorate
    async def steps():
        yield seen()
        await asyncio.sleep(0)
        try:
            received = yield seen()
            yield received, seen()
        except KeyError:
            yield "caught", seen()
        finally:
            closed.append(seen())

    closed: list[torch.dtype] = []

    async def main():
        assert await coroutine(1) == (1, WIDE, WIDE)
        assert [each async for each in steps()] == [WIDE, WIDE, (None, WIDE)] and seen() == LOW
        early, told = steps(), steps()
        await early.__anext__()
        await early.__anext__()
        await early.aclose()
        assert [await told.__anext__(), await told.__anext__(), seen()] == [WIDE, WIDE, LOW]
        assert await told.asend("sent") == ("sent", WIDE) and seen() == LOW
        assert await told.athrow(KeyError()) == ("caught", WIDE) and seen() == LOW
        with pytest.raises(StopAsyncIteration):
            await told.__anext__()
        return await asyncio.gather(*(coroutine(n) for n in range(5)))

    # asyncio.run copies this thread's context, casts included
    assert [n for n, *_ in asyncio.run(main())] == list(range(5))
    assert closed == [WIDE] * 3 and seen() == LOW


# --- whatever torch.no_grad() decorates ------------------------------------------------------------------------------------------


def _function(*args):
    args[-1]()


def _generator(*args):
    try:
        args[-1]()
        yield
        args[-1]()
        yield
    finally:
        args[-1]()


async def _coroutine(*args):
    args[-1]()
    await asyncio.sleep(0)
    args[-1]()


async def _async_generator(*args):
    args[-1]()
    yield
    await asyncio.sleep(0)
    args[-1]()
    yield


@types.coroutine
def _awaitable_generator(*args):
    args[-1]()
    yield
    args[-1]()


def _object_of(function):
    return type("Object", (), {"__call__": staticmethod(function)})()


def _owner_of(attribute):
    return type("Owner", (), {"attribute": attribute})


BODIES = (_function, _generator, _coroutine, _async_generator, _awaitable_generator)
WAYS = {
    "itself": lambda body, decorate: decorate(body),
    "twice": lambda body, decorate: decorate(decorate(body)),
    "lambda": lambda body, decorate: decorate(lambda *args: body(*args) if body is _function else args[-1]()),
    "partial": lambda body, decorate: decorate(functools.partial(body, 1)),
    "partial of a partial": lambda body, decorate: decorate(functools.partial(functools.partial(body, 1), 2)),
    "object": lambda body, decorate: decorate(_object_of(body)),
    "partial of an object": lambda body, decorate: decorate(functools.partial(_object_of(body), 1)),
    "bound method": lambda body, decorate: decorate(types.MethodType(body, 1)),
    "partial of a bound method": lambda body, decorate: decorate(functools.partial(types.MethodType(body, 1), 2)),
    "method": lambda body, decorate: _owner_of(decorate(body))().attribute,
    "static method": lambda body, decorate: _owner_of(decorate(staticmethod(body)))().attribute,
    "class method": lambda body, decorate: _owner_of(decorate(classmethod(body))).attribute,
}
OTHER = policy(bf16=["relu"], dtype=torch.float16)
DECORATORS = {"disable_casts": WIDE, "disable_casts()": WIDE, "casts(OTHER)": torch.float16, "no_grad()": None}


def _found(call, ask) -> tuple[list[object], list[object]]:
    """What `ask` returns in a call, and where the call is suspended and after it."""
    inside: list[object] = []
    outside: list[object] = []

    async def awaited(made):
        if inspect.isasyncgen(made):
            async for _ in made:
                outside.append(ask())
        else:
            await made

    made = call(lambda: inside.append(ask()))
    if inspect.isawaitable(made) or inspect.isasyncgen(made):
        asyncio.run(awaited(made))
    else:
        outside += [ask() for _ in made or ()]
    return inside, [*outside, ask()]


@settings(max_examples=30)
@given(st.sampled_from(BODIES), st.sampled_from(sorted(WAYS)), st.sampled_from([*DECORATORS]))
@example(_generator, "partial", "disable_casts")
@example(_async_generator, "class method", "casts(OTHER)")
def test_r14_it_decorates_whatever_no_grad_does(casting, body, way, name):
    if name == "no_grad()":  # the oracle of this test: where torch decorates it, hmp does
        theirs, ours = torch.no_grad(), hmp.disable_casts()
        try:
            inside, outside = _found(WAYS[way](body, theirs), torch.is_grad_enabled)
        except TypeError:  # a class method, a static method in an instance
            return
        found = _found(WAYS[way](body, ours), seen)
        assert all(on or dtype == WIDE for on, dtype in zip(inside, found[0], strict=True)) and all(outside)
        return
    decorate = {"disable_casts": hmp.disable_casts, "disable_casts()": hmp.disable_casts(), "casts(OTHER)": hmp.casts(OTHER)}[name]
    inside, outside = _found(WAYS[way](body, decorate), lambda: torch.relu(torch.ones(1)).dtype)
    assert inside and set(inside) == {DECORATORS[name]} and set(outside) == {LOW}


def test_r14_casts_without_parentheses_decorates_these_too():
    for way, make in WAYS.items():
        inside, outside = _found(make(_generator, hmp.casts), lambda: torch.matmul(torch.ones(1, 1), torch.ones(1, 1)).dtype)
        assert set(inside) == {LOW} and set(outside) == {WIDE}, way


def test_r14_classes_where_torch_decorates_them(casting):
    class Noting:
        def __init__(self):
            self.found = torch.is_grad_enabled(), torch.relu(torch.ones(1)).dtype

    def attempt(decorate):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                return decorate(Noting)().found, [(each.category, str(each.message)) for each in caught]
            except RuntimeError as error:
                return type(error), str(error)

    theirs, ours = attempt(torch.no_grad()), attempt(hmp.disable_casts)
    assert theirs == ours or ((theirs[0], ours[0]) == ((False, LOW), (True, WIDE)) and theirs[1] == ours[1])


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
    assert replicas() == {WIDE}
    hmp.convert()
    assert replicas() == {LOW}
    with hmp.disable_casts():
        assert replicas() == {WIDE}
        with hmp.enable_casts():
            assert replicas() == {LOW}
        with hmp.casts("habana"):
            assert replicas() == {LOW}
    with hmp.casts(policy(bf16=["mm"])):
        assert replicas() == {WIDE}
    with hmp.casts(policy(bf16=["relu"], dtype=torch.float16)):
        assert replicas() == {torch.float16}
    with torch.autocast("cpu", enabled=False):
        assert replicas() == {WIDE}
    hmp.revert()
    with hmp.casts("habana"):
        assert replicas() == {LOW}
        with hmp.disable_casts():
            assert replicas() == {WIDE}
    assert replicas() == {WIDE}
