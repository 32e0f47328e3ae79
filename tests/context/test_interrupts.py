"""An interrupt (Ctrl-C), wherever it lands, leaves its thread in the state that it was in, and nobody in a region.

Timed interrupts: an alarm whose handler raises, after a delay that is drawn from the time that the action takes; in other threads an
exception that is set from outside.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import ctypes
import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._C._dynamo import eval_frame

import hmp
from hmp import fork_safe
from hmp.context import Region, state
from thread_kit import in_thread
from trap_kit import policy

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no interval timers"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),  # interrupted before
]

LISTS = policy(bf16=["linear", "matmul"], fp32=["softmax", "layer_norm", "cross_entropy"])
OTHER = policy(bf16=["tanh"], fp32=["linear"])
x, w = torch.randn(2, 2), torch.randn(2, 2)
target = torch.tensor([0, 1])


class Interrupt(BaseException):
    """What the handler raises; nothing catches it by another name."""


def in_casts() -> None:
    with hmp.casts(OTHER):
        torch.tanh(x)


def in_disable_casts() -> None:
    with hmp.disable_casts():
        torch.relu(x)


def in_nested_regions() -> None:
    with hmp.disable_casts(), hmp.enable_casts(), hmp.casts(OTHER), hmp.disable_casts():
        pass


SHARED = hmp.disable_casts()


def in_a_region_that_is_entered_again() -> None:
    with SHARED, SHARED:
        pass


def with_an_exception_inside() -> None:
    with contextlib.suppress(ZeroDivisionError), hmp.disable_casts():
        1 / 0  # noqa: B018


@hmp.disable_casts
def decorated() -> torch.Tensor:
    return torch.relu(x)


@hmp.disable_casts
def decorated_and_failing() -> None:
    1 / 0  # noqa: B018


def with_an_exception_from_a_decorated_function() -> None:
    with contextlib.suppress(ZeroDivisionError):
        decorated_and_failing()


@hmp.casts(OTHER)
def decorated_with_casts() -> torch.Tensor:
    return torch.tanh(x)


@hmp.disable_casts()
def decorated_generator() -> Iterator[torch.Tensor]:
    yield x
    yield torch.relu(x)


@hmp.disable_casts()
async def decorated_coroutine() -> torch.Tensor:
    return torch.relu(x)


def drive() -> None:
    coroutine: Any = decorated_coroutine()
    with contextlib.suppress(StopIteration), contextlib.closing(coroutine):
        coroutine.send(None)


MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Softmax(dim=1))
TRAINED = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(TRAINED.parameters(), lr=0.0, momentum=0.5)


class Marks(torch.autograd.Function):
    """User Python in backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.relu(grad)


def backward() -> None:
    Marks.apply(TRAINED(x)).sum().backward()


def step() -> None:
    backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()


ACTIONS: dict[str, Callable[[], Any]] = {
    "casts()": in_casts,
    "disable_casts()": in_disable_casts,
    "nested": in_nested_regions,
    "entered again": in_a_region_that_is_entered_again,
    "an exception": with_an_exception_inside,
    "decorated": decorated,
    "decorated, an exception": with_an_exception_from_a_decorated_function,
    "decorated with casts()": decorated_with_casts,
    "decorated generator": lambda: list(decorated_generator()),
    "decorated coroutine": drive,
    "an applied model": lambda: MODEL(x),
    "composites": lambda: (F.softmax(x, 1), F.layer_norm(x, (2,)), F.cross_entropy(x, target)),
    "a module's construction": lambda: torch.nn.Linear(2, 2),
    "backward": backward,
    "optimizer": step,
}


@pytest.fixture
def in_force() -> Iterator[None]:
    """Both kinds of casts, and everything that is made at a first call made."""
    with hmp.convert(policy=LISTS):
        hmp.apply(MODEL, OTHER)
        for action in ACTIONS.values():
            action()
        yield
        OPTIMIZER.state.clear()
        OPTIMIZER.zero_grad()


def _long(action: Callable[[], Any]) -> tuple[Callable[[], None], float]:
    """The action, again and again for so long that an alarm can be set to ring inside, and the seconds that it takes then."""
    times = 1
    while True:
        started = time.perf_counter()
        for _ in range(times):
            action()
        taken = time.perf_counter() - started
        if taken > 2e-4:
            break
        times *= 2

    def repeated() -> None:
        for _ in range(times):
            action()

    return repeated, taken


def interrupt(action: Callable[[], Any], times: int, seed: int = 0) -> None:
    """Lets so many timed interrupts land in the action; AssertionError after one that left something in force."""
    here, standing = state.current_state(), len(state.regions_open)
    drawn = random.Random(seed)
    repeated, seconds = _long(action)

    def handler(*_: object) -> None:
        raise Interrupt

    swallowed: list[Any] = []
    before, hook = signal.signal(signal.SIGALRM, handler), sys.unraisablehook
    sys.unraisablehook = swallowed.append
    landed = 0
    try:
        while landed < times:
            ended = False
            try:
                signal.setitimer(signal.ITIMER_REAL, drawn.uniform(2e-6, seconds))
                repeated()
                ended = True
                _wait_for(swallowed)
            except Interrupt:
                pass
            landed += not ended
            seconds *= 0.8 if ended else 1.02  # the machine may have other things to do
            swallowed.clear()  # by a __del__ or a callback of somebody's
            torch.set_grad_enabled(True)  # torch.no_grad() is not proof against interrupts
            _is_as_before(here, standing)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def _wait_for(swallowed: list[Any]) -> None:
    """A function of its own: an interrupt in the condition of a loop passes over the `try` around it in Python 3.13.0."""
    until = time.monotonic() + 1
    while not swallowed and time.monotonic() < until:
        pass


def _is_as_before(here: Any, standing: int) -> None:
    assert state.current_state() is here
    if len(state.regions_open) != standing:
        gc.collect()  # a traceback that torch or Python keeps
    assert len(state.regions_open) == standing


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ACTIONS)
def test_an_interrupt_leaves_the_thread_as_it_was(name: str, in_force: None) -> None:
    interrupt(ACTIONS[name], 150)


@contextlib.contextmanager
def dynamo_runs_frames() -> Iterator[None]:
    """Python looks for interrupts after each call there, where it does not after calls of Python functions elsewhere."""
    before = eval_frame.set_eval_frame(False)  # as torch._dynamo.run() does
    try:
        yield
    finally:
        eval_frame.set_eval_frame(before)


@pytest.mark.parametrize("name", ["casts()", "nested", "decorated generator"])
def test_an_interrupt_leaves_the_thread_as_it_was_where_dynamo_runs_its_code(name: str, in_force: None) -> None:
    with dynamo_runs_frames():
        interrupt(ACTIONS[name], 150)


@pytest.fixture
def sigint_is_heard() -> Iterator[None]:
    """A shell has what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Bell:
    """An interrupt that comes by an operator: Python looks for none there, and this one waits for the next place where it does."""

    __neg__ = _thread.interrupt_main  # a builtin is not bound: called without arguments


class InterruptedAsItIsEntered(Region):
    def __enter__(self) -> Region:
        entered = super().__enter__()
        self.rung = -Bell()
        return entered


@pytest.mark.usefixtures("sigint_is_heard")
@pytest.mark.parametrize("by_dynamo", [False, True])
def test_an_interrupt_between_the_entering_and_the_block_ends_the_region(by_dynamo: bool, in_force: None) -> None:
    region: Any = hmp.casts(OTHER)
    region.__class__ = InterruptedAsItIsEntered
    with torch.autocast("cpu"), dynamo_runs_frames() if by_dynamo else contextlib.nullcontext():
        here, standing = state.current_state(), len(state.regions_open)
        with pytest.raises(KeyboardInterrupt), region:
            for _ in range(2):
                pass
        _is_as_before(here, standing)
        assert torch.is_autocast_enabled("cpu")  # which the policy had switched off


def test_an_interrupt_leaves_no_lock_locked() -> None:
    lock = fork_safe.RLock()

    def locked() -> None:
        with lock:
            pass

    interrupt(locked, 150)
    others: list[bool] = []
    in_thread(lambda: others.append(lock.acquire(blocking=False)))
    assert others == [True]


@pytest.mark.usefixtures("sigint_is_heard")
def test_python_3_14_does_not_leave_what_is_interrupted_between_the_entering_and_the_block() -> None:
    """Python's own, without hmp: where this fails, `holds` in hmp.context.regions and `__enter__` in hmp.fork_safe may be needless."""
    left = []

    class Entered:
        __enter__ = _thread.interrupt_main  # in C, as Dynamo has Python call all functions

        def __exit__(self, *exc_info: object) -> None:
            left.append(self)

    with pytest.raises(KeyboardInterrupt), Entered():
        for _ in range(2):
            pass
    assert bool(left) == (sys.version_info < (3, 14))


@pytest.mark.parametrize("name", ["disable_casts()", "composites"])
def test_an_interrupt_inside_a_region_leaves_the_thread_in_it(name: str, in_force: None) -> None:
    with hmp.casts(OTHER):
        interrupt(ACTIONS[name], 150)
        assert hmp.casts_enabled()


@pytest.mark.slow
@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", ACTIONS)
def test_thousands_of_interrupts_leave_the_thread_as_it_was(name: str, in_force: None) -> None:
    interrupt(ACTIONS[name], 3000, seed=1)


def interrupt_from_outside(action: Callable[[], Any], times: int) -> None:
    """The same for a thread that is not the main one."""
    set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
    errors: list[BaseException] = []
    ready, gone = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        here, standing = state.current_state(), len(state.regions_open)
        try:
            for _ in range(times):
                try:
                    ready.release()
                    while True:
                        action()
                except Interrupt:
                    pass
                torch.set_grad_enabled(True)
                _is_as_before(here, standing)
                gone.release()
        except BaseException as error:
            errors.append(error)
            gone.release()

    drawn = random.Random(0)
    worker = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        worker.start()
        for _ in range(times):
            assert ready.acquire(timeout=60)
            time.sleep(drawn.uniform(0, 2e-4))
            set_error(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(Interrupt))
            assert gone.acquire(timeout=60)
            if errors:
                raise errors[0]
        worker.join()
    finally:
        sys.setswitchinterval(interval)


# a thread's own hook for what __del__ swallows does not exist, and torch's optimizers have callbacks that do
FROM_OUTSIDE = ["casts()", "nested", "entered again", "decorated", "decorated generator", "an applied model", "composites"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_an_error_set_from_outside_leaves_another_thread_as_it_was(name: str, in_force: None) -> None:
    interrupt_from_outside(ACTIONS[name], 100)


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_thousands_of_errors_from_outside_leave_another_thread_as_it_was(name: str, in_force: None) -> None:
    interrupt_from_outside(ACTIONS[name], 2000)


def test_an_interrupt_while_a_module_is_made_leaves_threads_cast() -> None:
    """R9: casts are off in threads that a constructor starts, and on in those that are started once it has ended, however it ended."""
    hmp.convert(policy=LISTS)

    def check(call: int) -> None:
        assert F.linear(x, w).dtype is torch.bfloat16, f"an interrupt after call {call}"

    def interrupted(call: int) -> bool:
        calls = iter(range(call))

        def after_each_call(frame: object, event: str, arg: object) -> None:
            if event == "c_return" and next(calls, None) is None:
                sys.setprofile(None)
                raise Interrupt

        try:
            sys.setprofile(after_each_call)
            torch.nn.Linear(2, 2)
            return False
        except Interrupt:
            return True
        finally:
            sys.setprofile(None)
            torch.set_grad_enabled(True)  # torch's own no_grad() is left on by an interrupt in it
            in_thread(check, call)

    # what an interrupt leaves of this thread's own state stays in the copied context
    assert not contextvars.copy_context().run(lambda: all(map(interrupted, range(2000))))
