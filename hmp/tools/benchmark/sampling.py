"""Samples: the step timed under each variant in turn, in interleaved rounds, with its memory; and what the variants are."""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...core import lists
from ...core.active.regions import Region
from ...core.active.state import PROCESS
from ...core.convert import convert, is_in_place, revert
from ...core.observe import Call, Listener, listen
from ...core.policy import scopes
from ...core.policy.policy import Policy, as_policy
from ...core.policy.presets import device_preset
from ...core.torch_private import is_any_autocast_enabled
from ...errors import HmpError, OpListError
from ..model_state import Snapshot, seed_all
from ..saved_activations import saved_by

T = TypeVar("T")
clock = time.perf_counter


def seconds_of(step: Callable[[], T], count: int, device: torch.device) -> tuple[float, T]:
    """Return the seconds a step, over `count` steps, one or more, and what the last one returned."""
    synchronize(device)
    start = clock()
    for _ in range(count):
        result = step()
    synchronize(device)
    return (clock() - start) / count, result


def least_seconds(steps: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[float]:
    """Return the seconds of each step in its least disturbed round; in a round each is run once."""
    best = [math.inf] * len(steps)
    for _ in range(rounds):
        for at, step in enumerate(steps):
            best[at] = min(best[at], seconds_of(step, 1, device)[0])
    return best


def rotated(things: Sequence[T], number: int) -> list[T]:
    """Return the variants in the order of round `number`: each is the first of a round as often as the others."""
    first = number % len(things)
    return [*things[first:], *things[:first]]


def ratios(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio of `seconds` to `base` in each round.

    Rounds are compared, not medians: what slows a whole round down leaves its ratio as it is.
    """
    return [own / its for own, its in zip(seconds, base, strict=False)]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type == device.type:
        torch.accelerator.synchronize(device)


# --- what is compared: plain torch, torch.autocast and policies

FLOAT32 = "float32"
AUTOCAST = "torch.autocast"


def default_names(device: torch.device) -> tuple[str, str, str]:
    """Plain torch, torch.autocast, and hmp with the lists of the same."""
    return FLOAT32, AUTOCAST, device_preset(device)


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
        such = str(_name(policies)) if isinstance(policies, (str, os.PathLike, Policy)) else AUTOCAST
        raise HmpError(f"policies= expected a list, got {policies!r}; give such as policies=['float32', {such!r}]")
    found: dict[str, Variant] = {}
    for given in policies:
        variant = _variant(given, device, model)
        if variant.name in found:
            raise HmpError(f"policies= has {variant.name!r} twice; remove one, or rename it: policy.replace(name='another name')")
        found[variant.name] = variant
    if not found:
        raise HmpError("policies= is empty; give at least one, such as 'float32', 'torch.autocast' or 'autocast'")
    return list(found.values())


def _variant(given: Any, device: torch.device, model: torch.nn.Module | None) -> Variant:
    if given == FLOAT32:
        return Variant(FLOAT32)
    if given == AUTOCAST:
        if not torch.amp.is_autocast_available(device.type):
            raise HmpError(
                f"torch.autocast does not support the device {device.type!r}; remove {AUTOCAST!r} from policies, or give device="
            )
        # entered anew for each step: it keeps the casts of weights until it is left, also when the optimizer has changed the weights
        return Variant(AUTOCAST, around_step=lambda: torch.autocast(device.type))
    try:
        policy = as_policy(given)
    except OpListError as error:
        if error.path is None and isinstance(given, str):
            raise HmpError(f"{error}; 'float32' is plain torch, 'torch.autocast' is PyTorch's own autocast") from None
        raise
    if policy.name in (FLOAT32, AUTOCAST) and given is policy:
        raise HmpError(
            f"policies= has a policy called {policy.name!r}, as a row of plain torch is; rename it: policy.replace(name='another name')"
        )
    if model is None:
        scopes.refuse_without_model(policy)
    elif policy.scoped:
        scopes.resolve(policy, model)  # whatever is wrong with its lines is said now
    return Variant(str(_name(given)), around_sample=lambda: policy_active(policy, model))


@contextmanager
def policy_active(policy: Policy, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Make a context with `policy` active, its scoped entries in `model`; it restores what hmp did before."""
    # convert() and not casts(): a handle takes the patches off again
    with convert(policy=policy, model=model), Region("benchmark()", lambda _: PROCESS):
        yield


def _name(given: str | Path | Policy) -> str | Path:
    return given.name if isinstance(given, Policy) else given


# --- the memory of one step, and devices as users name them

PEAK = "peak memory"
SAVED = "saved for backward"
Meter = Callable[[Callable[[], object]], int]  # gives the bytes of a step, which it runs


def allocated(device: torch.device) -> int:
    """Return the bytes that the device's allocator holds now, 0 if it does not report them."""
    tell = getattr(getattr(torch, device.type, None), "memory_allocated", None)
    return 0 if tell is None else int(tell(device))


def meter(device: torch.device, own: list[torch.Tensor], copies: int) -> tuple[str, Meter]:
    """Return which memory is measured on this device, and how.

    The most that its allocator holds during a step, less the `copies` of the state that are hmp's; elsewhere what a step saves for
    backward, the state's `own` tensors left out.
    """
    module: Any = getattr(torch, device.type, None)

    def peak(step: Callable[[], object]) -> int:
        module.reset_peak_memory_stats(device)
        step()
        return int(module.max_memory_allocated(device)) - copies

    tells = all(hasattr(module, name) for name in ("reset_peak_memory_stats", "max_memory_allocated"))
    return (PEAK, peak) if tells else (SAVED, lambda step: saved_by(step, own))


def enters_autocast(step: Callable[[], object]) -> bool:
    """Return True if the step, which is run, saves a tensor for backward while torch.autocast is enabled."""
    found = False

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found = found or is_any_autocast_enabled()
        return tensor.detach()  # an op's result would hold the op's node, and nothing would free the two

    with saved_tensors_hooks(look, lambda tensor: tensor):
        step()
    return found


def device_of(given: Any, where: str = "") -> torch.device:
    """Return the device that `given`, an argument device=, means. HmpError, which begins with `where`, for what means none."""
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        why = f": {error}" if isinstance(given, str) else ""  # of another type torch says over several lines what it takes
        raise HmpError(f"{where}invalid device={given!r}{why}: expected one such as 'cpu' or 'cuda:0'") from None


def check_there(device: torch.device, where: str) -> None:
    """HmpError, which begins with `where`, for a kind of device that torch knows and does not see here."""
    is_available = getattr(getattr(torch, device.type, None), "is_available", None)
    if is_available is not None and not is_available():
        kind = device.type.upper()
        raise HmpError(f"{where}: torch finds no {kind} device; use 'cpu', or install torch for {kind}")


# --- samples

MIN_ROUNDS = 3  # fewer have no spread
_SAMPLE_SECONDS = 0.2
_SLOW_SECONDS = 1.0  # a first step as slow as this is not repeated to find out how many fill a sample: one does
_MOST_STEPS = 10_000


@dataclass
class Samples:
    """What one variant has shown so far: seconds a step and (first, last) loss of each sample."""

    variant: Variant
    seconds: list[float] = field(default_factory=list)
    losses: list[tuple[float | None, float | None]] = field(default_factory=list)
    memory: int | None = None
    failure: Exception | None = None
    notes: list[str] = field(default_factory=list)
    more: dict[str, float] = field(default_factory=dict)  # of one step, the columns of plug-ins' lists


class _Columns(Listener):
    """Adds up the columns that kinds of lists bring."""

    def __init__(self, sums: dict[str, float]) -> None:
        self._sums, self._columns = sums, lists.columns()

    def end(self, call: Call) -> None:
        for name, of in self._columns.items():
            if call.error is None and (value := of(call)):
                self._sums[name] = self._sums.get(name, 0) + value


@dataclass
class Sampler:
    """Runs `step`; `steps` are the timed steps of a sample, None until they are calibrated."""

    step: Callable[[], Any]
    snapshot: Snapshot
    measure: Meter
    device: torch.device
    seed: int
    steps: int | None
    untouched: bool  # whether hmp had patched nothing before
    say: Callable[[str], None]

    def collect(self, variants: list[Variant], seconds: float, rounds: int | None) -> list[Samples]:
        """Return the samples of every variant: `rounds` rounds, or as many as fit into `seconds` with the preparation."""
        start = clock()
        collected = [Samples(variant) for variant in variants]
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
                    self.say(f"round {done + 1}: {samples.variant.name}")
                    self._sample(samples)
            done, longest = done + 1, max(longest, clock() - before)
        return collected

    @property
    def untimed_steps(self) -> int:
        """Return the steps that a sample begins with."""
        return max(1, (self.steps or 0) // 10)

    def _prepare(self, samples: Samples) -> float | None:
        """Measure memory, and return the seconds that a step takes about; None where it fails."""
        variant = samples.variant
        self.say(f"preparing: {variant.name}")
        with self._from_the_start(samples):
            took = self._timed(variant, 1)[0]
            if self.steps is None and took < _SLOW_SECONDS:
                took, count = self._timed(variant, 1)[0], 1
                while took * count < _SAMPLE_SECONDS / 4 and count < _MOST_STEPS:
                    count *= 2
                    took, _ = self._timed(variant, count)
        if samples.failure is not None:
            return None
        self._look(samples)
        return took

    def _look(self, samples: Samples) -> None:
        """Run one or two more steps, watched; a step that fails when watched counts as without memory."""
        watched = Samples(samples.variant)
        with self._from_the_start(watched):
            with listen(_Columns(samples.more)) if lists.columns() else contextlib.nullcontext():
                self._once(samples.variant)
            samples.memory = self.measure(lambda: self._once(samples.variant))
            if samples.variant.name == FLOAT32:
                culprit = "torch.autocast" if enters_autocast(self.step) else "hmp" if self.untouched and is_in_place() else None
                if culprit is not None:
                    samples.notes.append(f"The step itself enables {culprit}, which affects every row. Take it out of the step.")
        if watched.failure is not None:
            samples.notes.append(f"{samples.variant.name}: memory could not be measured, {described(watched.failure)}")

    def _sample(self, samples: Samples) -> None:
        assert self.steps is not None
        with self._from_the_start(samples):
            first = loss_of(self._once(samples.variant))
            for _ in range(self.untimed_steps - 1):
                self._once(samples.variant)
            seconds, result = self._timed(samples.variant, self.steps)
            samples.seconds.append(seconds)
            samples.losses.append((first, loss_of(result)))

    def _once(self, variant: Variant) -> Any:
        with variant.around_step():
            return self.step()

    def _timed(self, variant: Variant, count: int) -> tuple[float, Any]:
        """Return the seconds a step, over `count` steps, and what the last one returned."""
        return seconds_of(functools.partial(self._once, variant), count, self.device)

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
