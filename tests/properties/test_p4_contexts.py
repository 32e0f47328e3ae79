"""P4, contexts: whatever is entered, left, begun, closed, collected or raised through, in a thread, another thread and a task, each has the
policy that it is in.

Oracle: `Lane`, a model of some twenty lines of what is open in one thread or task, in the order in which it was entered: the innermost
decides, by what it chose as it was entered, also where what was below has ended. It imports nothing of hmp. After every step each lane is
asked for the dtype of an op that torch.autocast does not list, for torch.autocast's real state, and for what hmp and torch answer. Rules
R14, R16, R17.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hmp
from autocast_kit import BF16, F16, F32, HALF, HERE, LOW, OFF, muls, real_state

ELSEWHERE = "xpu" if HERE == "cuda" else "cuda"
DTYPES = {"low": BF16, "half": F16}
ENTERED = ("low", "half", "disable", "enable", "autocast on", "autocast off")
BEGUN = ENTERED[:4]


PROCESS = "that of convert()"
Chosen = tuple[Any, str | None]  # the low-precision dtype of a policy, or PROCESS; why casts are off


def region(kind: str) -> Any:
    return {
        "low": lambda: hmp.casts(LOW),
        "half": lambda: hmp.casts(HALF),
        "disable": hmp.disable_casts,
        "enable": hmp.enable_casts,
        "autocast on": lambda: torch.autocast(HERE),
        "autocast off": lambda: torch.autocast(HERE, enabled=False),
    }[kind]()


def inside(kind: str) -> Iterator[None]:
    with region(kind):
        yield


class Lane:
    """A thread or a task, what is open in it, and where its steps run."""

    def __init__(self, run: Callable[[Callable[[], Any]], Any]) -> None:
        self.run = run
        self.open: list[tuple[str, Any, Chosen | None]] = []  # (kind, the generator or the stack that ends it, what it chose)

    def state(self, process: torch.dtype | None) -> tuple[torch.dtype | None, str | None, bool]:
        """The low-precision dtype of the policy, why casts are off, if they are, and whether torch.autocast is really enabled."""
        low, off = self.chosen()
        real = False
        for kind, _, _ in self.open:
            real = kind == "autocast on" or (real and kind in ("disable", "enable"))
        return process if low is PROCESS else low, off, real

    def chosen(self) -> Chosen:
        """What the innermost that chose anything chose as it was entered."""
        return next((chosen for _, _, chosen in reversed(self.open) if chosen is not None), (PROCESS, None))

    def choose(self, kind: str) -> Chosen | None:
        """What is chosen by entering `kind` here, None where it leaves everything as it is: the policy, and why casts are off."""
        low, off = now = self.chosen()
        if kind in DTYPES:
            return DTYPES[kind], None
        if kind == "disable":
            return low, "disable_casts"
        if kind == "enable":
            return low, None
        after = low, ((None if off == "autocast" else off) if kind == "autocast on" else (off or "autocast"))
        return after if after != now else None

    def enter(self, kind: str) -> None:
        stack, chosen = contextlib.ExitStack(), self.choose(kind)
        self.run(lambda: stack.enter_context(region(kind)))
        self.open.append((kind, stack, chosen))

    def begin(self, kind: str) -> None:
        generator, chosen = inside(kind), self.choose(kind)
        self.run(lambda: next(generator))
        self.open.append((kind, generator, chosen))

    def exit(self) -> None:
        """`with` has it innermost first."""
        if stacks := [each for each in self.open if isinstance(each[1], contextlib.ExitStack)]:
            self.run(stacks[-1][1].close)
            self.open.remove(stacks[-1])

    def ending(self, number: int, how: str) -> Callable[[], Any]:
        """What ends one of the generators, in any order: it is closed, gone on with, or collected."""
        begun = [each for each in self.open if not isinstance(each[1], contextlib.ExitStack)]
        if not begun:
            return lambda: None
        ended = begun[number % len(begun)]
        self.open.remove(ended)
        if how == "collected":
            cycle: list[Any] = [ended[1]]
            cycle.append(cycle)
            del begun, ended, cycle
            return gc.collect
        return ended[1].close if how == "closed" else lambda generator=ended[1]: list(generator)

    def end(self, number: int, how: str) -> None:
        self.run(self.ending(number, how))

    def through(self, kind: str) -> None:
        """An exception, a decorated function and a nested call leave nothing behind."""

        def work() -> None:
            with contextlib.suppress(ZeroDivisionError), region(kind):
                raise ZeroDivisionError
            region(kind)(muls)()

        self.run(work)

    def look(self) -> list[Any]:
        return self.run(seen)


def seen() -> list[Any]:
    """What is so here: the dtype of mul, torch.autocast's real state, what hmp and torch say of it."""
    (real, dtype), _, cached = real_state()
    asked = [each for device in (HERE, ELSEWHERE) for each in (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))]
    return [muls(), real, dtype, cached, hmp.casts_enabled(), *asked]


def expected(state: tuple[torch.dtype | None, str | None, bool]) -> list[Any]:
    low, off, real = state
    casts = low is not None and off is None
    here, elsewhere = OFF[0][1], OFF[1][1]
    return [
        low if casts else F32, real, here, True, casts,
        casts or real, low if casts and not real else here,
        casts, low if casts else elsewhere,
    ]  # fmt: skip


class Calling(torch.nn.Module):
    def forward(self, inside: Callable[[], Any] = lambda: None) -> torch.dtype:
        inside()
        return muls()


def in_backward(end: Callable[[], Any]) -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: end())
    x.sum().backward()


def ends_inside(end: Callable[[], Any], inside: Callable[[Callable[[], Any]], Any]) -> None:
    """Whoever is in the middle of a call or of backward stays in what it is in."""
    seen: list[torch.dtype] = []
    inside(lambda: seen.extend([muls(), end(), muls()][::2]))
    assert seen[0] is seen[1], f"{seen[0]} became {seen[1]} where a generator ended"


@contextlib.contextmanager
def two_tasks() -> Iterator[tuple[Lane, Lane]]:
    """Two tasks of one loop in another thread, whose steps run where they are."""
    loop, found = asyncio.new_event_loop(), []

    async def serve(commands: asyncio.Queue[Any]) -> None:
        while (command := await commands.get()) is not None:
            work, answer = command
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

    queues: list[asyncio.Queue[Any]] = [asyncio.Queue(), asyncio.Queue()]

    async def both() -> None:
        await asyncio.gather(*map(serve, queues))

    thread = threading.Thread(target=lambda: loop.run_until_complete(both()))
    thread.start()
    for commands in queues:

        def run(work: Callable[[], Any], commands: asyncio.Queue[Any] = commands) -> Any:
            answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
            loop.call_soon_threadsafe(commands.put_nowait, (work, answer))
            return answer.result(60)

        found.append(Lane(run))
    try:
        yield found[0], found[1]
    finally:
        for commands in queues:
            loop.call_soon_threadsafe(commands.put_nowait, None)
        thread.join()
        loop.close()


HOW = ("closed", "gone on with", "collected")
STEPS = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(ENTERED)),
    st.tuples(st.just("exit"), st.none()),
    st.tuples(st.just("begin"), st.sampled_from(BEGUN)),
    st.tuples(st.just("end"), st.tuples(st.integers(0, 3), st.sampled_from(HOW))),
    st.tuples(st.just("end inside"), st.tuples(st.integers(0, 3), st.sampled_from(HOW), st.sampled_from(["call", "backward"]))),
    st.tuples(st.just("through"), st.sampled_from(ENTERED)),
    st.tuples(st.just("call"), st.none()),
    st.tuples(st.just("convert"), st.sampled_from(["low", "half"])),
)
PROGRAMS = st.lists(st.tuples(st.integers(0, 2), STEPS), max_size=20)


def begin(kind: str) -> tuple[int, Any]:
    return 0, ("begin", kind)


def enter(kind: str) -> tuple[int, Any]:
    return 0, ("enter", kind)


LEAVE, END_FIRST = (0, ("exit", None)), (0, ("end", (0, "closed")))
COLLECT = (0, ("end", (0, "collected")))
# Nestings that went wrong once, or that a rule names.
NAMED = {
    "disabled inside casts": [enter("low"), enter("autocast off"), LEAVE],
    "enabled inside disabled": [enter("low"), enter("disable"), enter("enable"), LEAVE, LEAVE],
    "another policy inside": [enter("low"), enter("half"), LEAVE],
    "a policy inside autocast, and autocast inside that": [enter("autocast on"), enter("low"), enter("autocast on"), enter("half")],
    "casts disabled and enabled inside autocast": [enter("autocast on"), enter("disable"), enter("enable"), LEAVE, LEAVE],
    "an island inside autocast": [enter("low"), enter("autocast on"), enter("autocast off"), LEAVE],
    "autocast does not end disable_casts": [enter("low"), enter("disable"), enter("autocast on")],
    "autocast ends an island": [enter("low"), enter("autocast off"), enter("autocast on")],
    "casts ends disable_casts": [enter("disable"), enter("low"), LEAVE],
    "an autocast that ended first does not come back": [enter("autocast on"), begin("low"), LEAVE, END_FIRST],
    "hand over hand": [begin("disable"), begin("half"), END_FIRST, begin("disable"), END_FIRST, END_FIRST],
    "one ends below others": [begin("disable"), enter("half"), enter("disable"), END_FIRST, LEAVE],
    "collected in the middle": [begin("disable"), enter("half"), COLLECT],
    "tasks apart": [enter("low"), (1, ("enter", "half")), (2, ("enter", "disable")), (1, ("exit", None)), (2, ("exit", None))],
    **{
        f"collected inside {place}": [enter("low"), begin("disable"), enter("enable"), (0, ("end inside", (0, "collected", place)))]
        for place in ("call", "backward")
    },
    "a process that changes": [enter("disable"), (0, ("convert", "half")), LEAVE, (1, ("convert", "low"))],
}


def look_at_all(lanes: tuple[Lane, ...], process: torch.dtype | None, step: str) -> None:
    for at, each in enumerate(lanes):
        want = expected(each.state(process))
        assert each.look() == want, f"lane {at} after {step}: {each.look()}, the model says {want}"


def check(process: str | None, program: Any, *, begins_in_autocast: bool = True) -> None:
    chosen = DTYPES.get(process or "")
    hmp.revert()
    model = hmp.apply(Calling(), HALF)  # patches stand from here on, whatever is converted
    if process:
        hmp.convert(policy=LOW if process == "low" else HALF)
    main = Lane(lambda work: work())
    with two_tasks() as tasks:
        lanes = (main, *tasks)
        try:
            for number, (step, what) in program:
                lane = lanes[number]
                if lane is not main and "autocast" in str(what):
                    continue  # torch's state is a thread's, and two tasks share theirs
                if step == "convert":
                    if process is None:
                        continue
                    hmp.convert(policy=LOW if what == "low" else HALF)
                    chosen = DTYPES[what]
                elif step == "call":
                    _, off, _ = lane.state(chosen)
                    found = lane.run(model)
                    assert found is (F32 if off else F16), f"the applied model runs in {found}, off: {off}"
                elif step == "end":
                    lane.end(*what)
                elif step == "end inside":
                    end = lane.ending(*what[:2])
                    inside = hmp.enable_casts(model) if what[2] == "call" else in_backward
                    lane.run(functools.partial(ends_inside, end, inside))
                    del end
                elif step == "begin" and what in DTYPES and not begins_in_autocast and any("autocast" in kind for kind, _, _ in lane.open):
                    continue  # as with torch's own contexts, what ends out of order may leave the ones around it off
                else:
                    getattr(lane, step)(*([] if what is None else [what]))
                look_at_all(lanes, chosen, f"{step} {what}")
            for each in lanes:  # what was left open ends, and what is below shows
                while each.open:
                    each.exit()
                    look_at_all(lanes, chosen, "the end")
                    each.end(0, "closed")
                    look_at_all(lanes, chosen, "the end")
        finally:
            for each in lanes:
                while each.open:
                    each.exit()
                    each.end(0, "closed")
    hmp.revert()
    assert real_state() == OFF


@pytest.mark.parametrize("name", NAMED)
def test_p4_named_nestings(name: str) -> None:
    for process in (None, "low"):
        check(process, NAMED[name])


@settings(max_examples=2 * settings.default.max_examples)
@given(process=st.sampled_from([None, "low", "half"]), program=PROGRAMS)
def test_p4_whatever_is_open_each_has_the_policy_that_it_is_in(process: str | None, program: Any) -> None:
    check(process, program, begins_in_autocast=False)
