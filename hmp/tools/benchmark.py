"""benchmark(): the user's own training step in several precisions, as one table."""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..core.active.regions import Region, disable_casts
from ..core.active.state import PROCESS
from ..core.convert import convert, is_in_place, revert
from ..core.observe import listen
from ..core.policy import scopes
from ..core.policy.policy import Policy, as_policy
from ..core.policy.presets import device_preset
from ..core.torch_patches import module_calls
from ..core.torch_private import is_any_autocast_enabled
from ..errors import HmpError, OpListError
from .formatting import NOTHING, count, duration, size, some
from .model_state import Snapshot, default_device, random_state_kept, seed_all
from .pages.page import Cell, Items, Page, Result, Section, Table, number, op
from .saved_activations import SavedActivations

T = TypeVar("T")
NOISY = 0.15  # a spread, as a share of the median, above which ratios mean little
_SAME_LOSS = 1e-3  # two runs of one step from one state differ by less, also where a device adds in no fixed order


@dataclass(frozen=True)
class BenchmarkRow:
    """One policy. What could not be measured is None.

    `seconds` is the median time of a step over the `samples`, one sample a round; `spread` is their interquartile range in seconds, and
    `ratio` is `seconds` divided by the baseline's. `memory` is the bytes that a step keeps for backward; `weight_bytes` of them are copies
    of weights in another dtype, the others are activations. `loss` is that of the last step of the first sample. `error` is what the step
    raised, if it did.
    """

    name: str
    seconds: float | None = None
    spread: float | None = None
    ratio: float | None = None
    memory: int | None = None
    weight_bytes: int | None = None
    loss: float | None = None
    error: str | None = None
    samples: tuple[float, ...] = ()

    @property
    def noise(self) -> float:
        """The spread as a share of the median time; 0 where it is not known."""
        return self.spread / self.seconds if self.spread and self.seconds else 0.0


class StepError(HmpError):
    """The step failed under every policy; `__cause__` is what it raised under the first."""


@dataclass(frozen=True, repr=False)
class Benchmark(Result):
    """The rows in the order of the policies, and how they came about: `print(...)` shows a table.

    `baseline` names the row that ratios are taken against: "float32", or the first that ran. A sample was `untimed_steps` and
    then `steps` timed ones. `losses_compare` is whether every sample started from the same state.

    Example:
        >>> net, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
        >>> result = hmp.benchmark(lambda: net(x).sum().backward(), ["float32", "habana"], model=net, rounds=3, steps=1)
        >>> result["habana"].seconds > 0, result.to_dict()["baseline"]
        (True, 'float32')
        >>> path = result.to_json("benchmark.json")
    """

    rows: tuple[BenchmarkRow, ...]
    baseline: str
    rounds: int
    untimed_steps: int
    steps: int
    seed: int
    losses_compare: bool
    device: str
    torch: str
    threads: int
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> BenchmarkRow:
        return self._named(self.rows, name, "a policy that was benchmarked")

    def __iter__(self) -> Iterator[BenchmarkRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _page(self) -> Page:
        columns: list[tuple[str, Callable[[BenchmarkRow], float | None], Callable[[float], str]]] = [
            (">step time", lambda row: row.seconds, lambda seconds: duration(seconds, none="0 us")),
            (">spread", lambda row: None if row.spread is None else row.noise, "{:.1%}".format),
            (f">vs {self.baseline}", lambda row: row.ratio, "{:.2f}".format),
            (">activations kept", lambda row: None if row.memory is None else row.memory - (row.weight_bytes or 0), _size),
            (">weight copies kept", lambda row: row.weight_bytes, _size),
        ]
        if self.losses_compare:
            columns.append((f">loss, step {self.untimed_steps + self.steps}", lambda row: row.loss, "{:.5g}".format))
        rows = [[op(row.name), *(_shown(of(row), text) for _, of, text in columns)] for row in self.rows if row.error is None]
        failed = [f"{row.name}: {row.error}" for row in self.rows if row.error is not None]
        threads = f", {count(self.threads, 'thread')}" if self.device == "cpu" else ""
        return Page(
            title="hmp benchmark",
            verdict=f"{self.device}, torch {self.torch}{threads}; medians of {count(self.rounds, 'round')}, "
            f"{count(self.steps, 'timed step')} a policy in each",
            sections=[
                Section("policies", "Policies", "", [Table(["policy", *(name for name, *_ in columns)], rows, label="Policies")]),
                *([Section("failed", "Failed", "", [Items(failed)])] if failed else []),
                *([Section("notes", "Notes", "", [Items(self.notes)])] if self.notes else []),
            ],
        )


def _size(nbytes: float) -> str:
    return size(nbytes, none="0 B")


def _shown(value: float | None, text: Callable[[float], str]) -> Cell:
    return number(value, NOTHING if value is None else text(value))


def benchmark(  # noqa: PLR0913
    step: Callable[[], Any],
    policies: Iterable[str | Path | Policy] | None = None,
    *,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    state: Any = (),
    reset: Callable[[], object] | None = None,
    seconds: float = 30.0,
    rounds: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> Benchmark:
    """Benchmark a training or inference step under several policies: time, spread, memory and loss, as a table to print.

    Memory is what one step keeps for backward: activations, and in a column of their own copies of weights in another dtype.

    The policies take turns: a round takes one sample of each policy, in a rotating order. `torch.utils.benchmark.Timer` takes it: first
    two untimed steps, or one for a hundred timed ones. Every sample starts from the same state and the same seeds (torch, random, numpy),
    so all policies do the same work and their losses can be compared. Without `model`, `optimizer`, `state` and `reset` each policy
    continues the training of the previous one, and losses can't be compared. Afterwards torch is as before, also after an exception.

    Don't update the weights several times in one step (an epoch, LBFGS): torch.autocast would keep using the first cast of each weight.

    Args:
        step: A function without arguments that runs one training step (forward, backward, optimizer) or one inference step. If it returns
            the loss, a number or a tensor with one element, the table shows it.
        policies: "float32" is plain torch, "torch.autocast" is PyTorch's autocast in the device's default dtype. Every other one is an hmp
            policy: a preset's name, a folder or an `hmp.Policy`, active as by `hmp.convert()`, also in backward. Default: "float32",
            "torch.autocast" and the lists of the preset `autocast` under the name for the device, such as "torch-cpu".
        model: The model, whose parameters, buffers and gradients are restored before each sample and at the end. Entries with a scope
            match its modules.
        optimizer: The optimizer, whose state is restored too.
        state: One or several other objects with state_dict and load_state_dict that are restored too: a scheduler, a gradient scaler.
        reset: A function called whenever state is restored, to rewind objects without a state_dict, such as an iterator over batches.
        seconds: The time for all rounds; there are at least three.
        rounds: The number of rounds, instead of `seconds`.
        steps: The timed steps of a sample. Default: as many as take 0.2 s.
        seed: The seed of every sample.
        device: The device that the step runs on. Default: the model's device; without a model the accelerator, if there is one, else the
            CPU. Accelerators are synchronised around samples.

    Returns:
        The rows. If the step fails under a policy, its row has the error, and the other policies are still run.

    Raises:
        HmpError: For wrong arguments, before anything has run.
        StepError: The step failed under every policy; it is an HmpError.

    Example:
        >>> net, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
        >>> result = hmp.benchmark(lambda: net(x).sum().backward(), ["float32", "habana"], model=net, rounds=3, steps=1)
        >>> [row.name for row in result]
        ['float32', 'habana']
    """
    _check_step(step)
    check_numbers(seconds, rounds=rounds, steps=steps)
    _check_surroundings()
    where = _device(device, model)
    untouched = not is_in_place()
    with disable_casts(), random_state_kept(where):
        compared = variants((FLOAT32, AUTOCAST, device_preset(where)) if policies is None else policies, where, model)
        snapshot = Snapshot(model, optimizer, state, reset)
        sampler = Sampler(step, snapshot, seed, steps, untouched)
        try:
            collected = sampler.collect(compared, seconds, rounds)
        finally:
            snapshot.restore()
    failures = [samples.failure for samples in collected if samples.failure is not None]
    if len(failures) == len(collected):
        raise StepError(
            f"the step failed under every policy; under {collected[0].variant.name!r} with {described(failures[0])}; make it run first"
        ) from failures[0]
    with disable_casts():
        rows = [_row(samples) for samples in collected]
    done = [row for row in rows if row.error is None]
    baseline = next((row for row in done if row.name == FLOAT32), done[0])
    rows = [row if row.seconds is None else replace(row, ratio=row.seconds / (baseline.seconds or 1)) for row in rows]
    return Benchmark(
        rows=tuple(rows),
        baseline=baseline.name,
        rounds=len(baseline.samples),
        untimed_steps=sampler.untimed_steps,
        steps=sampler.steps or 0,
        seed=seed,
        losses_compare=snapshot.given,
        device=_device_name(where),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        notes=tuple(_notes(collected, rows, snapshot.given, untouched)),
    )


# --- arguments


def _check_step(step: Any) -> None:
    if not callable(step):
        raise HmpError(f"step= expected a function without arguments that runs one step, got {type(step).__name__}")
    try:
        inspect.signature(step).bind()
    except ValueError:
        pass  # written in C: its arguments are unknown
    except TypeError as error:
        raise HmpError(f"step= expected a function without arguments, got one that needs some ({error}); give lambda: step(...)") from None


def check_numbers(seconds: float = 1.0, **counts: int | None) -> None:
    """Raise HmpError for a time that isn't positive, and for a count below 1; a count of None means as many as it takes."""
    if not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
        raise HmpError(f"invalid seconds={seconds!r}: expected a positive number")
    for name, given in counts.items():
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise HmpError(f"invalid {name}={given!r}: expected a whole number, 1 or more")


def _check_surroundings() -> None:
    if is_any_autocast_enabled():
        raise HmpError("torch.autocast is enabled around benchmark(), and would affect every row; call benchmark() outside of it")
    if module_calls.any_applied():
        raise HmpError(
            "a policy is applied to a module by hmp.apply(), and would override all; call hmp.remove(model) or hmp.revert() first"
        )


def _device(given: Any, model: Any) -> torch.device:
    if given is not None:
        return device_of(given)
    first = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    return default_device() if first is None else torch.device(first.device)


def _device_name(device: torch.device) -> str:
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if name is None or device.type == "cpu" else f"{device.type} ({name(device)})"


def device_of(given: Any, where: str = "") -> torch.device:
    """Return the device that `given`, an argument device=, means. HmpError, which begins with `where`, for what means none."""
    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        raise HmpError(f"{where}invalid device={given!r}: expected one such as 'cpu' or 'cuda:0'") from None


# --- what is compared: plain torch, torch.autocast and policies

FLOAT32 = "float32"
AUTOCAST = "torch.autocast"


@dataclass(frozen=True)
class Variant:
    """A row to be, and makers of the two contexts."""

    name: str
    around_sample: Callable[[], AbstractContextManager[Any]] = nullcontext
    around_step: Callable[[], AbstractContextManager[Any]] = nullcontext


def variants(policies: Iterable[str | Path | Policy], device: torch.device, model: torch.nn.Module | None = None) -> list[Variant]:
    """Return the variants of these names, folders and policies. Raise HmpError for none, for one named twice and for one that there is not.

    `model` is the one whose modules scoped entries name.
    """
    if isinstance(policies, str) or not isinstance(policies, Iterable):
        such = policies if isinstance(policies, str) else AUTOCAST
        raise HmpError(f"policies= expected a list, got {policies!r}; give for example policies=['float32', {such!r}]")
    found: dict[str, Variant] = {}
    for given in policies:
        variant = _variant(given, device, model)
        if variant.name in found:
            raise HmpError(f"policies= has {variant.name!r} twice; remove one, or rename it: policy.replace(name='another name')")
        found[variant.name] = variant
    if not found:
        raise HmpError("policies= is empty; give at least one, for example 'float32', 'torch.autocast' or 'autocast'")
    return list(found.values())


def _variant(given: Any, device: torch.device, model: torch.nn.Module | None) -> Variant:
    if given == FLOAT32:
        return Variant(FLOAT32)
    if given == AUTOCAST:
        if not torch.amp.is_autocast_available(device.type):
            raise HmpError(f"torch.autocast does not support the device {device.type!r}; remove it from policies=, or give device=")
        # entered anew for each step: it keeps the casts of weights until it is left, also when the optimizer has changed the weights
        return Variant(AUTOCAST, around_step=lambda: torch.autocast(device.type))
    try:
        policy = as_policy(given)
    except OpListError as error:
        if error.path is None and isinstance(given, str):
            raise HmpError(f"{error}; 'float32' is plain torch, 'torch.autocast' is PyTorch's own autocast") from None
        raise
    if policy.name in (FLOAT32, AUTOCAST) and given is policy:
        raise HmpError(f"policies= has a policy called {policy.name!r}, as rows without hmp are; rename it: policy.replace(name='mine')")
    if model is None:
        scopes.refuse_without_model(policy)
    elif policy.scoped:
        scopes.resolve(policy, model)  # whatever is wrong with its lines is said now
    return Variant(policy.name if given is policy else str(given), around_sample=lambda: policy_active(policy, model))


@contextmanager
def policy_active(policy: Policy, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Make a context with `policy` active, its scoped entries in `model`; it restores what hmp did before."""
    # convert() and not casts(): a handle takes the patches off again
    with convert(policy=policy, model=model), Region("benchmark()", lambda _: PROCESS):
        yield


# --- the memory of one step


class _Watcher(SavedActivations):
    """Sees of a step what it keeps for backward, and whether torch.autocast is enabled in it."""

    is_autocast = False

    def saved(self, tensor: torch.Tensor) -> None:
        self.is_autocast = self.is_autocast or is_any_autocast_enabled()
        super().saved(tensor)


# --- samples

MIN_ROUNDS = 3  # fewer have no spread
_SAMPLE_SECONDS = 0.2
_MOST_STEPS = 10_000


@dataclass
class Samples:
    """What one variant has shown so far: the time, and the last loss, of each sample."""

    variant: Variant
    row: BenchmarkRow  # what is known of it besides
    times: list[Any] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    failure: Exception | None = None
    notes: list[str] = field(default_factory=list)


class _Counted:
    """The step as it is timed. It knows how often it ran, and what it returned last."""

    def __init__(self, step: Callable[[], Any], variant: Variant) -> None:
        self._step, self._around = step, variant.around_step
        self.calls = 0
        self.result: Any = None

    def __call__(self) -> None:
        with self._around():
            self.result = self._step()
        self.calls += 1


@dataclass
class Sampler:
    """Runs `step`; `steps` are the timed steps of a sample, None until they are calibrated, and `untimed_steps` run before them."""

    step: Callable[[], Any]
    snapshot: Snapshot
    seed: int
    steps: int | None
    untouched: bool  # whether hmp had patched nothing before
    untimed_steps: int = 0

    def collect(self, variants: list[Variant], seconds: float, rounds: int | None) -> list[Samples]:
        """Return the samples of every variant: `rounds` rounds, or as many as fit into `seconds` with the preparation."""
        start = clock()
        collected = [Samples(variant, BenchmarkRow(variant.name)) for variant in variants]
        step_seconds = [took for samples in collected if (took := self._prepare(samples)) is not None]
        if self.steps is None and step_seconds:
            self.steps = min(max(math.ceil(_SAMPLE_SECONDS / max(min(step_seconds), 1e-9)), 1), _MOST_STEPS)
        done, longest = 0, 0.0
        while any(samples.failure is None for samples in collected):
            before = clock()
            if done == rounds if rounds is not None else done >= MIN_ROUNDS and before - start + longest > seconds:
                break
            for samples in rotated(collected, done):
                if samples.failure is None:
                    self._sample(samples)
            done, longest = done + 1, max(longest, clock() - before)
        return collected

    def _prepare(self, samples: Samples) -> float | None:
        """Measure memory, and return the seconds that a step takes about; None where it fails."""
        took: float | None = None
        with self._from_the_start(samples):
            took = self._timed(samples.variant, 1)[0].median
        if took is not None:
            self._look(samples)
        return took

    def _look(self, samples: Samples) -> None:
        """Run one more step, watched; a step that fails when watched counts as without memory."""
        attempt, watcher = Samples(samples.variant, samples.row), _Watcher(self.snapshot.tensors)
        step = _Counted(self.step, samples.variant)
        with self._from_the_start(attempt):
            with listen(watcher):
                step()
            samples.row = replace(samples.row, memory=watcher.bytes, weight_bytes=watcher.weight_bytes)
            if samples.variant.name == FLOAT32 and watcher.is_autocast:
                samples.notes.append("The step itself enables torch.autocast, which affects every row. Take it out of the step.")
        if attempt.failure is not None:
            samples.notes.append(f"{samples.variant.name}: memory could not be measured, {described(attempt.failure)}")

    def _sample(self, samples: Samples) -> None:
        assert self.steps is not None
        with self._from_the_start(samples):
            time, step = self._timed(samples.variant, self.steps)
            samples.times.append(time)
            samples.losses.append(loss_of(step.result))
            self.untimed_steps = step.calls - self.steps

    def _timed(self, variant: Variant, steps: int) -> tuple[Any, _Counted]:
        """Return the time of so many steps, which Timer begins with some untimed ones, and the step."""
        step = _Counted(self.step, variant)
        return torchs().Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads()).timeit(steps), step

    @contextmanager
    def _from_the_start(self, samples: Samples) -> Iterator[None]:
        """Make a context that begins with the state restored; an error in it becomes the failure of `samples`."""
        self.snapshot.restore()
        seed_all(self.seed)
        try:
            with samples.variant.around_sample():
                yield
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
            samples.failure = error
        finally:
            if self.untouched:
                revert()  # what the step itself may have put in place


def loss_of(result: Any) -> float | None:
    """Return the loss that a step returned, None where it returned something else."""
    if isinstance(result, torch.Tensor):
        return float(result.detach()) if result.numel() == 1 and not result.is_complex() else None
    return float(result) if isinstance(result, numbers.Real) else None


def described(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def torchs() -> Any:
    """Return torch.utils.benchmark. Its import takes a tenth of a second: what only compares or summarizes a model does without."""
    from torch.utils import benchmark

    return benchmark


def clock() -> float:
    """Return the time in seconds, once the accelerator has done its work."""
    return float(torchs().timer())


def seconds_of(step: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that a step takes, and what it returns."""
    start = clock()
    result = step()
    return clock() - start, result


def rotated(things: Sequence[T], number: int) -> list[T]:
    """Return the variants in the order of round `number`: each is the first of a round as often as the others."""
    first = number % len(things)
    return [*things[first:], *things[:first]]


# --- rows and notes


def _row(samples: Samples) -> BenchmarkRow:
    row = replace(samples.row, error=None if samples.failure is None else described(samples.failure))
    if not samples.times:
        return row
    (time,) = torchs().Measurement.merge(samples.times)
    spread = time.iqr if len(time.times) >= MIN_ROUNDS else None
    return replace(row, seconds=time.median, spread=spread, loss=samples.losses[0], samples=tuple(time.times))


def _notes(collected: list[Samples], rows: list[BenchmarkRow], restored: bool, untouched: bool) -> list[str]:
    notes = ["Kept for backward in a step: activations, and copies of weights in another dtype. Weights themselves don't count."]
    if noisy := [f"{row.name} {row.noise:.0%}" for row in rows if row.noise > NOISY]:
        notes.insert(
            0,
            f"Too noisy: the spread is more than {NOISY:.0%} ({some(noisy)}), so the ratios mean little. Stop other programs, and repeat "
            "it for longer: seconds=120, or hmp benchmark --seconds 120.",
        )
    if not restored:
        notes.append("The losses can't be compared: each policy continued the training of the previous one. Give model= and optimizer=.")
    if not untouched:
        notes.append("hmp was in use before benchmark(), so every row has the time of its patches. Call hmp.revert() first.")
    for samples in collected:
        notes += samples.notes
        name, lasts = samples.variant.name, [loss for loss in samples.losses if loss is not None]
        bad = next((loss for loss in lasts if not math.isfinite(loss)), None)
        if bad is not None:
            notes.append(f"{name}: the loss became {bad}.")
        elif restored and lasts and max(lasts) - min(lasts) > _SAME_LOSS * max(map(abs, lasts)):
            notes.append(
                f"{name}: the same steps ended at losses from {min(lasts):.5g} to {max(lasts):.5g}, so smaller differences mean nothing. "
                "Pass all state that the step changes (model=, optimizer=, state=), and reset its batches (reset=)."
            )
    return notes
