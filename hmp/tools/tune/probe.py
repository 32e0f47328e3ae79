"""What each op of a step gains on the lists that it may move to, and what that does to the loss: one watched float32 step.

Where a decided op has run in float32, it runs under the rule of each list too, on the same inputs: the difference, times the gradient that
backward brings, is the first-order change of the loss.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...core import observe
from ...core.active.regions import disable_casts
from ...core.casting import Tensor, castable, each_castable, each_tensor, map_tensors
from ...core.compiler_stance import running_uncompiled
from ...core.lists import ListKind
from ...core.observe import Listener, listen
from ...core.policy.entries import ListName
from ...core.policy.policy import Policy
from ...core.policy.scopes import plain_path
from ...core.rules import registry
from ...core.rules.op import Op, writes
from ...core.rules.registry import op_wrap
from ...core.torch_private import functorch_level
from ..benchmark import seconds_of
from ..model_state import random_state_kept
from ..saved_activations import saved_by
from .decisions import Decisions, Key
from .task import Task

Call = tuple[tuple[Any, ...], dict[str, Any]]
_REPEATS = 5


@dataclass
class Measured:
    """Sums over the calls of one unit in a step, on one list: what it gains there and of how much, and what its rounding does."""

    calls: int = 0
    gain: float = 0.0
    of: float = 0.0
    errors: float = 0.0
    norms: float = 0.0
    loss_change: float = 0.0
    loss_variance: float = 0.0
    has_gradient: bool = False
    cannot: str = ""

    @property
    def error(self) -> float:
        """Return the relative error of all calls together."""
        return math.inf if self.cannot else math.sqrt(self.errors / self.norms) if self.norms else 0.0

    def change(self, loss: float) -> float:
        """Return the relative change of the loss, to first order; the error where no gradient came back."""
        if self.cannot or not self.has_gradient:
            return self.error
        return max(abs(self.loss_change), math.sqrt(self.loss_variance)) / max(abs(loss), 1e-12)

    def note(self, got: Tensor, wanted: Tensor) -> list[Any]:
        """Add the error of one result against float32's. Return the hooks on the latter that show what the error does to the loss."""
        if not wanted.is_floating_point() or wanted.layout is not torch.strided:
            return []
        reference = wanted.detach()
        error = got.to(torch.float32) - reference
        finite = torch.isfinite(reference)
        if not bool(torch.isfinite(error)[finite].all()):
            self.cannot = "gives NaN or Inf"
            return []
        error = torch.where(finite, error, 0.0)
        self.errors += float(error.double().square().sum())
        self.norms += float(torch.where(finite, reference, 0.0).double().square().sum())
        return [wanted.register_hook(self._first_order(error))] if wanted.requires_grad else []

    def _first_order(self, error: Tensor) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            with disable_casts(), torch.no_grad():
                product = gradient.to(torch.float32) * error
                self.has_gradient = True
                self.loss_change += float(product.double().sum())
                self.loss_variance += float(product.double().square().sum())

        return hook


Found = dict[ListName, dict[Key, Measured]]  # by list, of each unit


def probe(task: Task, decisions: Decisions, kinds: tuple[ListKind, ...], in_bytes: bool) -> tuple[Found, float]:
    """Return what one step on the first batch shows of each unit on these lists, and its loss. The step's results are float32's.

    On a list whose level counts nothing of its own the gain is in bytes that are saved for backward, or in seconds.
    """
    probing = _Probe(task, decisions, kinds, in_bytes)
    try:
        loss = _watched_step(task, decisions.policy({}), probing)
    finally:
        for hook in probing.hooks:
            hook.remove()  # what an op gives may be a parameter itself, which would keep it
    return probing.found, loss


def probe_added(task: Task, decisions: Decisions, kind: ListKind, policy: Policy) -> dict[Key, Measured]:
    """Return what one step under the policy shows of each unit on a list that adds, which every op is on."""
    level = kind.level
    assert level is not None
    assert level.recording is not None
    calls = _AddedCalls(task, decisions, kind)
    kept = level.recording(lambda path: calls.unit(path).module or "")
    _watched_step(task, policy.replace(**{kind.name: frozenset({"*"})}, **level.words), calls, kept)
    for row in kept.rows():
        measured = calls.found.get(decisions.key(row.op, row.module))
        if measured is not None:
            measured.gain, measured.of = row.nbytes - row.left, row.nbytes
            measured.errors, measured.norms = row.error**2, 1.0
    return calls.found


def _watched_step(task: Task, policy: Policy, *listeners: Listener) -> float:
    task.from_the_start()
    with running_uncompiled(), task.under(policy), listen(*listeners):
        loss = task.loss(task.batches[0])
        if loss.requires_grad:
            loss.backward()
    return float(loss.detach())


class _Units(Listener):
    """Knows the unit of a call."""

    def __init__(self, task: Task, decisions: Decisions) -> None:
        self._task = task
        self._decisions = decisions
        self._paths = {id(module): plain_path(name) for name, module in task.model.named_modules()}

    def unit(self, op: str) -> Key:
        """Return the unit of a call of the op that runs now."""
        return self._decisions.key(op, self._paths.get(id(next(reversed(observe.modules.running), None)), ""))


class _AddedCalls(_Units):
    """Counts the calls of ops that are on a list that adds."""

    def __init__(self, task: Task, decisions: Decisions, kind: ListKind) -> None:
        super().__init__(task, decisions)
        self._kind = kind
        self.found: dict[Key, Measured] = defaultdict(Measured)

    def begin(self, call: observe.Call) -> None:
        """Count it."""
        if call.ruled is not None and self._kind in call.ruled.added:
            self.found[self.unit(call.op)].calls += 1


class _Probe(_Units):
    """Runs each op under the rules of the lists where it has run in float32. Calls of other threads than its own go on unwatched."""

    def __init__(self, task: Task, decisions: Decisions, kinds: tuple[ListKind, ...], in_bytes: bool) -> None:
        super().__init__(task, decisions)
        self.found: Found = {kind.name: defaultdict(Measured) for kind in kinds}
        self.hooks: list[Any] = []
        self._kinds = kinds
        self._in_bytes = in_bytes
        self._begun: tuple[Call, Tensor] | None = None  # the arguments as they were before, and the state of random numbers
        self._thread = threading.get_ident()

    def begin(self, call: observe.Call) -> None:
        """Keep the arguments of a decided op."""
        self._begun = None
        ruled, here = call.ruled, threading.get_ident() == self._thread
        if not here or ruled is None or ruled.rule is not registry.FP32_LIST or writes(call.args, call.kwargs, ruled):
            return
        op = self._decisions.op_of(ruled.op)
        if op is None:
            return
        for kind in self._kinds_of(ruled.op):
            self.found[kind.name][self.unit(op)].calls += 1
        if functorch_level() is None:  # else tensors stand for others, and have no numbers to compare
            with disable_casts():
                self._begun = _as_given(call.args, call.kwargs), self._draws()

    def end(self, call: observe.Call) -> None:
        """Measure it."""
        begun, self._begun = self._begun, None
        if begun is None or call.error is not None or call.ruled is None:
            return
        given, draws = begun
        op = self._decisions.op_of(call.ruled.op)
        assert op is not None
        with disable_casts():
            drew = not torch.equal(draws, self._draws())
            for kind in self._kinds_of(call.ruled.op):
                measured = self.found[kind.name][self.unit(op)]
                try:
                    # hooks of its own: what checkpointing keeps and computes again is to be the model's alone
                    with random_state_kept(self._task.device), saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
                        self._measure(measured, kind, call, given, drew)
                except Exception as error:  # torch refuses, or numpy in a function that the user registered
                    measured.cannot = f"cannot run: {str(error).partition(chr(10))[0] or type(error).__name__}"

    def _kinds_of(self, op: str) -> list[ListKind]:
        return [kind for kind in self._kinds if kind.level is None or kind.level.ops is None or op in kind.level.ops]

    def _draws(self) -> Tensor:
        """Return the state of the random numbers that the op may draw."""
        if self._task.device.type == "cpu":
            return torch.get_rng_state()
        found: Tensor = torch.get_device_module(self._task.device).get_rng_state()
        return found

    def _measure(self, measured: Measured, kind: ListKind, call: observe.Call, given: Call, drew: bool) -> None:
        """Add the error of the op alone, hang on its result a hook for what that does to the loss, and add what is gained."""
        ruled, start = call.ruled, self._decisions.start
        assert ruled is not None
        words = tuple((word.field, getattr(start, word.field)) for word in kind.words)
        moved = op_wrap(call.function, ruled._replace(rule=kind.rule, words=(*ruled.words, *words)))
        results = list(each_castable((call.result,)))
        args, kwargs = map_tensors(given, lambda t: t.detach().clone())
        with torch.no_grad():
            found = list(each_castable((moved(*args, **kwargs),)))
        if drew:
            found = [t.detach().to(self._decisions.low) for t in results]  # other draws aren't an error: what is left is rounding
        for got, wanted in zip(found, results, strict=True):
            self.hooks += measured.note(got, wanted)
        if kind.level is not None and kind.level.gain is not None:
            gain, of = kind.level.gain(call.function, ruled.op, args, kwargs, start)
        else:
            of, there = self._costs(op_wrap(call.function, ruled), moved, given)
            gain = of - there
        measured.gain += gain
        measured.of += of

    def _costs(self, wide: Op, low: Op, given: Call) -> list[float]:
        """Return what the call costs in float32 and in the low-precision dtype, in bytes or in seconds of forward and backward.

        What is computed comes in that dtype: only parameters and batches are sure to need a cast.
        """
        calls = [(wide, _fresh(given)), (low, _fresh(given, self._decisions.low))]
        if self._in_bytes:
            return [saved_by(partial(op, *args, **kwargs)) for op, (args, kwargs) in calls]
        steps = [partial(_there_and_back, op, call, [t for t in each_tensor(call) if t.requires_grad]) for op, call in calls]
        rounds = [[seconds_of(step)[0] for step in steps] for _ in range(_REPEATS)]
        return [min(seconds) for seconds in zip(*rounds, strict=True)]  # the least disturbed one


def _there_and_back(function: Op, call: Call, leaves: list[Tensor]) -> None:
    """Forward and backward of an op, down to `leaves`."""
    args, kwargs = call
    outs = [t for t in each_tensor((function(*args, **kwargs),)) if t.requires_grad and t.is_floating_point()]
    if outs and leaves:
        torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)


def _as_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the arguments as they are before the call; what the op may write (running statistics) is copied."""
    found: Call = map_tensors((args, kwargs), lambda t: t if t.requires_grad else t.detach().clone())
    return found


def _fresh(given: Call, low: torch.dtype | None = None) -> Call:
    """Return the call with tensors of its own: leaves are leaves, and what is computed comes in `low` where that is given."""

    def fresh(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if tensor.is_leaf:
            return copy
        return copy.to(low) if low is not None and castable(tensor) else copy.clone()

    found: Call = map_tensors(given, fresh)
    return found
