"""Thousands of training steps among conversions, regions, saves and threads: the weights are plain torch's to the bit, memory is flat."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from hypothesis.strategies._internal.utils import clear_strategy_cache

import hmp
import soak_twin
from hmp.context import state
from soak_twin import CompiledPolicy
from trap_kit import policy

LOW, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32
POLICIES: dict[str, tuple[Any, CompiledPolicy]] = {
    "habana": ("habana", CompiledPolicy(LOW, LOW, LOW)),
    "torch-cpu": ("torch-cpu", CompiledPolicy(LOW)),
    "half": (policy(bf16=["linear", "mul"], dtype=HALF), CompiledPolicy(HALF, None, HALF)),
    "wide": (policy(fp32=["linear"], bf16=["relu"]), CompiledPolicy(WIDE, LOW, None)),
}
NAMES = st.sampled_from(list(POLICIES))


class Soak(RuleBasedStateMachine):
    """hmp, and a model of what is in force: the process's conversions, and the regions of this thread."""

    twin: ClassVar[Any]
    pool: ClassVar[ThreadPoolExecutor]
    steps: ClassVar[int] = 0

    def _tell(self, *told: Any) -> None:
        self.twin.send(told)

    def _answer(self) -> Any:
        assert self.twin.poll(60)
        return self.twin.recv()

    @initialize(kind=st.sampled_from(["radam", "sgd", "fused"]))
    def begin(self, kind: str) -> None:
        self.conversions: list[tuple[Any, str]] = []
        self.regions: list[tuple[str, Any, str | None]] = []  # kind, entered region, policy of a "casts" until a revert voids it
        self.next_step = 1
        self.net, self.optimizer = soak_twin.fresh(kind)
        self.hooked: list[bool] = []
        self.net.up.weight.register_hook(lambda grad: self.hooked.append(hmp.casts_enabled()))
        self.kept = self._saved()
        self._tell("reset", kind)
        assert self._answer() == soak_twin.digest(self.net)

    # --- what is in force

    def of_process(self) -> CompiledPolicy:
        return POLICIES[self.conversions[-1][1]][1] if self.conversions else CompiledPolicy()

    def in_force(self) -> CompiledPolicy:
        base, on = self.of_process(), True
        for kind, _, name in self.regions:
            if kind == "casts":
                base = POLICIES[name][1] if name is not None else CompiledPolicy()
            on = kind != "off"
        return base if on else CompiledPolicy()

    @rule(name=NAMES)
    def convert(self, name: str) -> None:
        self.conversions.append((hmp.convert(policy=POLICIES[name][0]), name))

    @precondition(lambda self: self.conversions)
    @rule(back=st.integers(1, 3))
    def take_back(self, back: int) -> None:
        at = max(0, len(self.conversions) - back)
        self.conversions[at][0].revert()
        del self.conversions[at:]

    @rule()
    def revert(self) -> None:
        hmp.revert()
        self.conversions.clear()
        self.regions = [(kind, region, None) for kind, region, _ in self.regions]

    @precondition(lambda self: len(self.regions) < 4)
    @rule(kind=st.sampled_from(["off", "on", "casts"]), name=NAMES)
    def enter(self, kind: str, name: str) -> None:
        region = {"off": hmp.disable_casts, "on": hmp.enable_casts, "casts": lambda: hmp.casts(POLICIES[name][0])}[kind]()
        region.__enter__()
        self.regions.append((kind, region, name))

    @precondition(lambda self: self.regions)
    @rule()
    def leave(self) -> None:
        self.regions.pop()[1].__exit__(None, None, None)

    # --- what is done

    @rule(steps=st.integers(1, 120), micro=st.sampled_from([1, 1, 3]))
    def train(self, steps: int, micro: int) -> None:
        self._tell("train", self.in_force(), self.next_step, steps, micro)
        losses = []
        for step in range(self.next_step, self.next_step + steps):
            for part in range(micro):
                x, y = soak_twin.batch(10 * step + part)
                loss = F.mse_loss(self.net(x).float(), y)
                loss.backward()
                losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.next_step += steps
        Soak.steps += steps
        assert (losses, self._digest()) == self._answer()
        assert self.hooked == [False] * steps * micro  # R13
        self.hooked.clear()

    def _digest(self) -> int:
        with hmp.disable_casts():
            return soak_twin.digest(self.net)

    @rule(threads=st.integers(0, 3), mode=st.sampled_from([torch.no_grad, torch.inference_mode]))
    def infer(self, threads: int, mode: Callable[[], Any]) -> None:
        """In this thread, and in others, which see the process's casts."""

        def infer(step: int) -> Any:
            with mode():
                y = self.net(soak_twin.batch(step)[0])
            return str(y.dtype), y.tolist()

        others = [self.pool.submit(infer, number) for number in range(1, threads + 1)]
        found = [infer(0), *(other.result(60) for other in others)]
        for number, each in enumerate(found):
            self._tell("infer", self.of_process() if number else self.in_force(), number)
            assert each == self._answer()

    def _saved(self) -> bytes:
        file = io.BytesIO()
        torch.save((self.net.state_dict(), self.optimizer.state_dict()), file)
        return file.getvalue()

    @rule()
    def save(self) -> None:
        self._tell("save")
        self.kept = self._saved()
        self._answer()

    @rule()
    def load(self) -> None:
        self._tell("load")
        net, optimizer = torch.load(io.BytesIO(self.kept), weights_only=True)
        self.net.load_state_dict(net)
        self.optimizer.load_state_dict(optimizer)
        assert self._digest() == self._answer()

    @invariant()
    def says_what_is_in_force(self) -> None:
        if hasattr(self, "regions"):
            assert hmp.casts_enabled() == (self.in_force() != CompiledPolicy())
            assert hmp.is_converted() == bool(self.conversions)

    def teardown(self) -> None:
        for _, region, _ in reversed(getattr(self, "regions", [])):
            region.__exit__(None, None, None)
        hmp.revert()
        assert not hmp.casts_enabled()


A, W, B = torch.randn(5, 6), torch.randn(7, 6), torch.randn(7)
_LINEAR = {repr(F.linear(A.to(d), W.to(d), B.to(d)).tolist()) for d in (LOW, HALF, WIDE)}
_NORMALIZED = {repr(F.normalize(A).tolist())}  # one op, in the precision of its input, whatever is listed of what it calls


@contextlib.contextmanager
def _others() -> Iterator[None]:
    """Meanwhile two threads compute: every op fully under casts, or fully without."""
    done, errors = threading.Event(), []

    def compute() -> None:
        while not done.is_set() and not errors:
            try:
                assert repr(F.linear(A, W, B).tolist()) in _LINEAR
                assert repr(F.normalize(A).tolist()) in _NORMALIZED
            except BaseException as error:
                errors.append(error)
            done.wait(0.001)

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


class Measure(NamedTuple):
    """What there is after so many steps, with hmp reverted."""

    steps: int
    tensors: int
    objects: int
    resident: int  # bytes


def _soak(at_least: int, examples: int = 6) -> list[Measure]:
    """Mixes until so many training steps are done, and measures after every so many examples of Hypothesis'."""
    Soak.steps, measured = 0, []
    options = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking what took a race to fail says nothing
        suppress_health_check=list(HealthCheck),
    )
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=soak_twin.serve, args=(theirs,), daemon=True)
    process.start()
    Soak.twin = ours
    gc.collect()
    standing = len(state.regions_open)  # regions that the tests before this one left, as a thread of theirs that still runs does
    try:
        with ThreadPoolExecutor(3) as Soak.pool:
            while Soak.steps < at_least:
                with _others():
                    run_state_machine_as_test(seed(len(measured))(Soak), settings=options)
                measured.append(_measure(Soak.steps, standing))
    finally:
        ours.send(None)
        process.join(30)
        process.kill()
        del Soak.twin, Soak.pool
    return measured


def _measure(steps: int, standing: int) -> Measure:
    clear_strategy_cache()  # Hypothesis keeps the latest 1024 strategies, some 30 objects each
    assert hmp.cache_info()[:2] == (0, 0)
    gc.collect()
    assert len(state.regions_open) <= standing
    objects = gc.get_objects()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in objects)
    with open("/proc/self/statm") as file:
        return Measure(steps, tensors, len(objects), int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from Linux's /proc")


@pytest.mark.slow
@needs_proc
def test_a_short_soak_gives_what_plain_torch_gives(torch_differences: Callable[[], list[str]]) -> None:
    measured = _soak(50, examples=2)
    assert len({each.tensors for each in measured}) == 1
    assert torch_differences() == []


@needs_proc
@pytest.mark.nightly
def test_twelve_thousand_steps_give_what_plain_torch_gives_in_flat_memory(torch_differences: Callable[[], list[str]]) -> None:
    measured = _soak(12_000)
    assert torch_differences() == []
    middle = next(each for each in measured if each.steps > 6_000)  # a kernel is made once, with the first mix of dtypes that needs it
    late = measured[-1]
    assert late.steps > middle.steps + 3_000, measured
    assert late.tensors == middle.tensors, measured
    assert late.objects < middle.objects + 100, measured
    assert late.resident < middle.resident + 4 * 2**20, measured
