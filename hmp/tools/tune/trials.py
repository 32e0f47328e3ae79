"""Trials: the task run under one policy after another, held against float32, and the best of them; an earlier search's are taken over."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...core.casting import each_tensor
from ...core.policy import Policy
from ...errors import HmpError, OpListError
from ..benchmark.sampling import ratios, rotated
from ..formatting import of_json
from .decisions import Key
from .lists import JSON_FILE
from .result import Objective, Stopped, Tolerance, Trial, TuneResult, Unit, least_gain, result_of, trial_of
from .task import Outcome, Task, cosine, failed

_ANEW = "give another folder, or resume=False (--no-resume) to start anew"
# Losses of the same training that are further apart are of two tasks; by less they differ with the number of threads.
_SAME_LOSS = 1e-4


class OtherTaskError(HmpError):
    """The folder holds what was measured of another task."""


class Journal:
    """Return the trials and measurements of an earlier search with this key; empty without one.

    Raise HmpError if the folder holds those of another task, or the file isn't hmp's.
    """

    def __init__(self, folder: Path | None, key: Mapping[str, str], resume: bool) -> None:
        self.trials: dict[str, Trial] = {}
        self.units: tuple[Unit, ...] = ()
        self.result: TuneResult | None = None  # of a search that ended by itself
        self._file = file = None if folder is None else folder / JSON_FILE
        if file is None or not resume or not file.is_file():
            return
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            known = values["key"]
            apart = [f"{name} ({known.get(name)} there, {key[name]} here)" for name in key if key[name] != known.get(name)]
            if apart:
                raise OtherTaskError(f"{file}: an earlier search had another {' and another '.join(apart)}; {_ANEW}")
            self.trials = {_id(trial.name, trial.policy): trial for trial in map(trial_of, values["trials"])}
            self.units = tuple(of_json(Unit, each) for each in values["units"])
            if values["stopped"] == Stopped.SOLVED:
                self.result = result_of(values)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise HmpError(
                f"{file}: expected a tune.json of hmp, got {type(error).__name__}: {error}; remove it, or give another folder"
            ) from None

    def trial(self, name: str, policy: Policy) -> Trial | None:
        """Return the trial of that policy, None where it was not made."""
        return self.trials.get(_id(name, policy))

    def check(self, known: float, loss: float) -> None:
        """Compare float32's loss with that of the earlier search: another model, loss or optimizer gives another. HmpError then."""
        if not math.isclose(known, loss, rel_tol=_SAME_LOSS):
            raise OtherTaskError(
                f"{self._file}: an earlier search had another model, loss or optimizer: its float32 loss was {known:.6g}, now it is "
                f"{loss:.6g}; {_ANEW}"
            )


def search_key(task: Task, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what identifies a search: its settings, the shapes of the model's tensors and the first batch."""
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in task.model.state_dict().items()]
    batch = hashlib.sha256()
    for tensor in each_tensor((task.batches[0],)):
        if tensor.layout is torch.strided and not tensor.is_nested:
            plain = tensor.detach().cpu().contiguous()
            batch.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))  # without numpy
    found: dict[str, Any] = {"model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:12], "first batch": batch.hexdigest()[:12]}
    found |= {"number of batches": len(task.batches), "steps": task.steps, "torch": torch.__version__, "device": task.device}
    return {name: str(value) for name, value in {**settings, **found}.items()}


def _id(name: str, policy: Policy) -> str:
    return name if name == "float32" else policy.fingerprint  # float32 runs without hmp


FLOAT32 = "float32"
# A step that is less than this faster is taken to be as fast.
NOISE = 0.02
_NO_LISTS = Policy(name=FLOAT32)
_ROUNDS = 5
_IN_RUN_OFF = 4


class Over(Exception):
    """The search's time or number of trials is spent."""


class Budget:
    """How long a search may take; its time begins when this is made. Raise HmpError for numbers that cannot be a bound."""

    def __init__(self, seconds: float | None, max_trials: int | None) -> None:
        if seconds is not None and not (_is_number(seconds, float) and 0 < seconds < math.inf):
            raise HmpError(f"invalid seconds={seconds!r}: expected a number above 0, such as 600.0 for ten minutes, or None")
        if max_trials is not None and not (_is_number(max_trials) and max_trials > 0):
            raise HmpError(f"invalid max_trials={max_trials!r}: expected a whole number above 0, such as 30, or None")
        self._until = math.inf if seconds is None else time.perf_counter() + seconds
        self._left = math.inf if max_trials is None else max_trials

    def take(self) -> None:
        """Spend one trial. Raise Over if none is left."""
        if self._left <= 0 or time.perf_counter() >= self._until:
            raise Over
        self._left -= 1


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, (int, *kinds)) and not isinstance(value, bool)


class Trials:
    """All that were made, by name, float32 first, and the best of those that fit: `best` is None until there is one.

    `tell` is called when one was made, or taken from an earlier search.
    """

    def __init__(self, task: Task, tolerance: Tolerance, objective: Objective, budget: Budget, journal: Journal) -> None:
        self.tell: Callable[[], None] = lambda: None
        self.tolerance = tolerance
        self.objective = objective
        self.budget = budget
        self.made: dict[str, Trial] = {}
        self.best: Trial | None = None
        self._task = task
        self._journal = journal

    def begin(self) -> None:
        """Run float32, which all others are held against. Raise HmpError where it gives nothing to keep to."""
        known = self._journal.trial(FLOAT32, _NO_LISTS)
        if known is not None:
            self._journal.check(known.loss, self._task.run(None).loss)
        reference = self._note(self._in_float32() if known is None else known)
        if self.objective == Objective.MEMORY and not reference.saved_bytes:
            raise HmpError(
                'a step saves nothing for backward, or torch does not report it, so there is nothing to minimise; give objective="time"'
            )

    @property
    def least_gain(self) -> float:
        """Return the smallest gain that counts, in seconds or bytes of a step."""
        return least_gain(self.made[FLOAT32], self.objective)

    def _in_float32(self) -> Trial:
        before = self._task.batch_versions()
        outcome = self._outcome(None)
        if self._task.batch_versions() != before:
            raise HmpError("loss(model, batch) writes into the batch's tensors, but every trial needs the same batch; write into clones")
        if outcome.failure:
            raise HmpError(f"the float32 baseline failed: {outcome.failure}; make the step train in float32 first")
        return Trial(FLOAT32, _NO_LISTS, None, outcome.loss, 0.0, outcome.metric, None if outcome.metric is None else 0.0,
            None if outcome.gradient is None else 1.0, outcome.seconds, outcome.saved_bytes, True, ratio=1.0)  # fmt: skip

    @functools.cached_property
    def _gradient(self) -> tuple[torch.Tensor, ...] | None:
        """float32's."""
        return self._task.gradient()

    def _outcome(self, policy: Policy | None) -> Outcome:
        self.budget.take()
        return self._task.run(policy)

    def of(
        self,
        name: str,
        policy: Policy,
        low: frozenset[Key] | None = None,
        left: frozenset[str] = frozenset(),
        fp8: frozenset[Key] = frozenset(),
    ) -> Trial:
        """Return the trial of the policy, which has these units in the low-precision dtype and in FP8 and leaves these ops.

        Made now, or earlier.

        With units in FP8 it is not held against the best: see lead(). Raise Over if the budget is spent.
        """
        known = self._known(name, policy)
        if known is not None:
            return known
        trial = replace(self._judged(name, policy, low), left=tuple(sorted(left)), fp8=tuple(sorted(map(str, fp8))))
        if not trial.fits or fp8:
            return self._note(trial)
        return self._note(self._timed(trial) if self.objective == Objective.TIME else self._weighed(trial))

    def packing(self, name: str, policy: Policy, packed: frozenset[Key], like: Trial) -> Trial:
        """Return the trial of the policy, which keeps these units' tensors packed and has all else from `like`: made now, or earlier.

        Raise Over if the budget is spent.
        """
        known = self._known(name, policy)
        if known is not None:
            return known
        trial = replace(self._judged(name, policy, None), low=like.low, left=like.left, fp8=like.fp8, saved=tuple(sorted(map(str, packed))))
        return self._note(self._weighed(trial) if trial.fits else trial)

    def _known(self, name: str, policy: Policy) -> Trial | None:
        """Return the trial of the policy that was made, in this search or an earlier one."""
        for trial in self.made.values():
            if trial.name != FLOAT32 and trial.policy == policy:
                return trial
        known = self._journal.trial(name, policy)
        return None if known is None else self._note(known)

    def _weighed(self, trial: Trial) -> Trial:
        """Return the trial, which leads where it keeps fewer bytes than the best."""
        return replace(trial, led=self.best is None or trial.saved_bytes <= self.best.saved_bytes - self.least_gain)

    def lead(self, trial: Trial) -> None:
        """Make the trial the best."""
        self.made[trial.name] = self.best = replace(trial, led=True)

    def lead_if_faster(self, trial: Trial) -> bool:
        """Time the trial against the best, make it the best if it is faster, and return whether it is."""
        timed = self.made[trial.name] = self._timed(trial)
        if timed.led:
            self.best = timed
        return timed.led

    def _timed(self, trial: Trial) -> Trial:
        """Return the trial with its time against float32's; the best so far runs in the same rounds, and must be beaten in most of them."""
        best = self.best
        if best is None:
            return replace(trial, ratio=statistics.median(self._ratios([trial])[0]), led=True)
        own, bests = self._ratios([trial, best])
        won = ratios(own, bests)
        led = statistics.median(won) < 1 - NOISE and sum(each < 1 for each in won) >= 0.8 * len(won)
        return replace(trial, ratio=statistics.median(own), led=led)

    def _tried(self, policy: Policy) -> Outcome:
        """Return what came of the policy, or that nothing could."""
        try:
            return self._outcome(policy)
        except OpListError as error:
            return failed(str(error))
        except (Over, HmpError):
            raise
        except Exception as error:  # torch refuses, or the user's code does: it may assert that the loss is finite
            return failed(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _judged(self, name: str, policy: Policy, low: frozenset[Key] | None) -> Trial:
        outcome = self._tried(policy)
        reference = self.made[FLOAT32]
        loss_change = (outcome.loss - reference.loss) / max(abs(reference.loss), 1e-12)
        metric_change = None
        if outcome.metric is not None and reference.metric is not None:
            metric_change = (reference.metric - outcome.metric) / max(abs(reference.metric), 1e-12)
        similar = cosine(outcome.gradient, self._gradient)
        why = outcome.failure or self.tolerance.exceeded(loss_change, metric_change, similar)
        return Trial(
            name=name,
            policy=policy,
            low=None if low is None else tuple(sorted(map(str, low))),
            loss=outcome.loss,
            loss_change=loss_change,
            metric=outcome.metric,
            metric_change=metric_change,
            gradient_cosine=similar,
            seconds=outcome.seconds,
            saved_bytes=outcome.saved_bytes,
            fits=not why,
            why=why,
        )

    def _note(self, trial: Trial) -> Trial:
        same = sum(1 for name in self.made if name.partition(" (")[0] == trial.name)
        trial = replace(trial, name=f"{trial.name} ({same + 1})") if same else trial
        self.made[trial.name] = trial
        if trial.led:
            self.best = trial
        self.tell()
        return trial

    def _ratios(self, trials: Sequence[Trial], rounds: int = _ROUNDS) -> list[list[float]]:
        """Return the time of a step under each trial's policy as a ratio to float32's in the same round; one list a trial."""
        timers = [self._task.timer(None), *(self._task.timer(trial.policy) for trial in trials)]
        seconds: list[list[float]] = [[] for _ in timers]
        for number in range(rounds):
            for at in rotated(range(len(timers)), number):
                seconds[at].append(timers[at]())
        return [ratios(own, seconds[0]) for own in seconds[1:]]

    def cost(self, trial: Trial) -> float:
        """Return what is made small, as a ratio to float32."""
        if self.objective == Objective.TIME:
            return math.inf if trial.ratio is None else trial.ratio
        return trial.saved_bytes / max(self.made[FLOAT32].saved_bytes, 1)

    def run_off(self) -> None:
        """Time the best and those that were nearly as fast against each other once more, and take the fastest. No more for memory."""
        if self.objective != Objective.TIME or self.best is None:
            return
        fitting = sorted((t for t in self.made.values() if t.fits and t.name not in (FLOAT32, self.best.name)), key=self.cost)
        near = [self.best, *fitting[: _IN_RUN_OFF - 1]]
        for trial, found in zip(near, self._ratios(near, 2 * _ROUNDS - 1), strict=True):
            self.made[trial.name] = replace(trial, ratio=statistics.median(found))
        self.best = min((self.made[trial.name] for trial in near), key=self.cost)
