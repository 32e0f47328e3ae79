"""What each op of a step costs in float32 and in low precision, and what its rounding does to the loss: one watched float32 step.

Where a decided op has run in float32, it runs in the low-precision dtype too, on the same inputs: the difference, times the gradient that
backward brings, is the first-order change of the loss.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ...core import lists, observe
from ...core.active import disable_casts
from ...core.casting import Caster, Tensor, each_castable, each_tensor, map_tensors
from ...core.compiler_stance import running_uncompiled
from ...core.observe import Listener, listen
from ...core.policy import plain_path
from ...core.rules import Op, OpUnderRule, op_wrap, registry, writes
from ...core.torch_private import functorch_level
from ..benchmark.sampling import least_seconds
from ..model_state import random_state_kept
from ..saved_activations import saved_by
from .decisions import Decisions, Key
from .task import Task

Call = tuple[tuple[Any, ...], dict[str, Any]]

_REPEATS = 5


@dataclass
class Rounding:
    """What running in one dtype does to a unit's results, and so to the loss: sums over its calls. `unseen`: of some nothing is known."""

    errors: float = 0.0
    norms: float = 0.0
    loss_change: float = 0.0
    loss_variance: float = 0.0
    has_gradient: bool = False
    cannot: str = ""
    unseen: bool = False

    @property
    def error(self) -> float:
        """Return the relative error of all calls together."""
        return math.inf if self.cannot else math.sqrt(self.errors / self.norms) if self.norms else 0.0

    def sensitivity(self, loss: float) -> float | None:
        """Return the relative change of the loss; None if no gradient came back."""
        if self.cannot:
            return math.inf
        if not self.has_gradient:
            return None if self.errors or self.unseen else 0.0
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


@dataclass
class Measured:
    """Sums over the calls of one unit in a step; `work` is floating-point operations of its products, `work_fp8` of those FP8 can take."""

    calls: int = 0
    low: Rounding = field(default_factory=Rounding)
    fp8: Rounding = field(default_factory=Rounding)
    seconds_float32: float = 0.0
    seconds_low: float = 0.0
    cast_seconds: float = 0.0
    saved_bytes: int = 0
    work: int = 0
    work_fp8: int = 0


@dataclass
class Measurements:
    """What a watched step gave: the loss, and the measurements of each unit."""

    units: dict[Key, Measured] = field(default_factory=dict)
    loss: float = 0.0


def probe(task: Task, decisions: Decisions) -> Measurements:
    """Return the measurements of one step on the first batch, from the task's state. The step's results are float32's."""
    task.from_the_start()
    probing = Probe(task, decisions)
    policy = decisions.policy(())
    try:
        with running_uncompiled(), task.under(policy), listen(probing):
            loss = task.loss(task.batches[0])
            probing.measurements.loss = float(loss.detach())
            if loss.requires_grad:
                loss.backward()
    finally:
        for hook in probing.hooks:
            hook.remove()  # what an op gives may be a parameter itself, which would keep it
    return probing.measurements


@dataclass
class _Op:
    """A function of torch, as the probe calls it: in float32, in the low-precision dtype, and in FP8 where it is a product and FP8 a level.

    What the low-precision dtype casts is in `cast`, by id.
    """

    name: str
    ruled: OpUnderRule
    full: Op
    low: Op
    fp8: Op | None
    cast: dict[int, Tensor] = field(default_factory=dict)  # holds them, so that no other gets the same id

    def noting(self, caster: Caster) -> Caster:
        """Return `caster`, which notes what it casts."""

        def note(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            if tensor.dtype is not dtype:
                self.cast[id(tensor)] = tensor
            return caster(tensor, dtype)

        return note


class Probe(Listener):
    """Runs each op in both dtypes where it has run in float32. Calls of other threads than its own go on unwatched."""

    def __init__(self, task: Task, decisions: Decisions) -> None:
        self.measurements = Measurements()
        self._task = task
        self._decisions = decisions
        self._paths = {id(module): plain_path(name) for name, module in task.model.named_modules()}
        self.hooks: list[Any] = []
        self._ops: dict[tuple[Any, OpUnderRule], _Op | None] = {}
        self._begun: tuple[_Op, Call, Tensor] | None = None  # with the arguments as they were before, and the state of random numbers
        self._thread = threading.get_ident()
        self._timed: dict[Any, tuple[float, float, int]] = {}
        self._cast_seconds: dict[int, float] = {}

    def begin(self, call: observe.Call) -> None:
        """Keep the arguments of a decided op."""
        self._begun = None
        if threading.get_ident() != self._thread or call.ruled is None:
            return
        key = call.function, call.ruled
        if key not in self._ops:
            self._ops[key] = self._in_each_dtype(*key)
        op = self._ops[key]
        if op is None or writes(call.args, call.kwargs, call.ruled):
            return
        if functorch_level() is not None:
            measured = self._unit(op)  # tensors stand for others there, and have no numbers to compare
            measured.calls, measured.low.unseen = measured.calls + 1, True
            return
        with disable_casts():
            self._begun = op, _as_given(call.args, call.kwargs), self._draws()

    def end(self, call: observe.Call) -> None:
        """Measure it."""
        begun, self._begun = self._begun, None
        if begun is not None and call.error is None:
            op, given, draws = begun
            with disable_casts():
                self._measure(op, given, call.result, not torch.equal(draws, self._draws()))

    def _in_each_dtype(self, function: Op, ruled: OpUnderRule) -> _Op | None:
        name = self._decisions.op_of(ruled.op)
        if ruled.rule is not registry.FP32_LIST or name is None:
            return None
        fp8 = None
        kind = lists.kind_of("fp8")
        if self._decisions.in_fp8 and ruled.op in kind.level.ops:
            start = self._decisions.start
            words = tuple((word.field, getattr(start, word.field)) for word in kind.words)
            fp8 = op_wrap(function, ruled._replace(rule=kind.rule, words=words))
        op = _Op(name, ruled, op_wrap(function, ruled), function, fp8)
        op.low = op_wrap(function, ruled._replace(rule=registry.BF16_LIST), around_cast=op.noting)
        return op

    def _draws(self) -> Tensor:
        """Return the state of the random numbers that the op may draw."""
        if self._task.device.type == "cpu":
            return torch.get_rng_state()
        found: Tensor = torch.get_device_module(self._task.device).get_rng_state()
        return found

    def _unit(self, op: _Op) -> Measured:
        key = self._decisions.key(op.name, self._paths.get(id(observe.modules.innermost), ""))
        return self.measurements.units.setdefault(key, Measured())

    def _measure(self, op: _Op, call: Call, result: Any, drew: bool) -> None:
        measured = self._unit(op)
        measured.calls += 1
        try:
            # hooks of its own: what checkpointing keeps and computes again is to be the model's alone
            with random_state_kept(self._task.device), saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
                taken = self._compare(measured, op, call, result, drew)
                if taken:
                    self._time(measured, op, call, taken)
        except Exception as error:  # torch refuses, or numpy in a function that the user registered
            measured.low.cannot = str(error).partition("\n")[0] or type(error).__name__
            return
        # what is computed may come in the low-precision dtype: only parameters and batches are sure to need a cast
        measured.cast_seconds += sum(self._cast_of(t) for at, t in enumerate(each_tensor(call)) if at in taken and t.is_leaf)

    def _compare(self, measured: Measured, op: _Op, call: Call, result: Any, drew: bool) -> frozenset[int]:
        """Note the error of the op alone, and hang on its result a hook for what that does to the loss.

        Gives the positions, among the tensors of the call, of those that are cast.
        """
        results = list(each_castable((result,)))
        with torch.no_grad():
            args, kwargs = _copied(call, detach=True)
            op.cast.clear()
            lows = list(each_castable((op.low(*args, **kwargs),)))
        taken = frozenset(at for at, t in enumerate(each_tensor((args, kwargs))) if id(t) in op.cast)
        op.cast.clear()
        if drew:
            lows = [t.detach().to(self._decisions.low) for t in results]  # other draws aren't an error: what is left is rounding
        for got, wanted in zip(lows, results, strict=True):
            self.hooks += measured.low.note(got, wanted)
        if op.fp8 is not None:
            self._compare_in_fp8(measured, op, call, lows[0], results[0])
        return taken

    def _compare_in_fp8(self, measured: Measured, op: _Op, call: Call, low: Tensor, result: Tensor) -> None:
        """Note the product's work, and the error of FP8, which is that of the low-precision dtype where the call cannot run in FP8."""
        assert op.fp8 is not None
        args, kwargs = _copied(call, detach=True)
        work = _work(op.full, (args, kwargs))
        measured.work += work
        start = self._decisions.start
        if not lists.kind_of("fp8").level.why_not(op.ruled.op, args, kwargs, start):
            measured.work_fp8 += work
            try:
                with torch.no_grad():
                    low = op.fp8(*args, **kwargs)
            except Exception as error:  # a device's kernel refuses; the low-precision dtype is not worse for it
                measured.fp8.cannot = str(error).partition("\n")[0] or type(error).__name__
                return
        self.hooks += measured.fp8.note(low, result)

    def _time(self, measured: Measured, op: _Op, call: Call, taken: frozenset[int]) -> None:
        """Note seconds and saved bytes in both dtypes; measured once for calls of the same form."""
        form = (op.ruled, _form(call))
        if form not in self._timed:
            wide, narrow = self._seconds((op.full, _copied(call)), (op.low, _copied(call, cast=taken, dtype=self._decisions.low)))
            self._timed[form] = (wide, narrow, _saved(op.full, call) - _saved(op.low, call, self._decisions.low, taken))
        wide, narrow, saved = self._timed[form]
        measured.seconds_float32 += wide
        measured.seconds_low += narrow
        measured.saved_bytes += saved

    def _seconds(self, *runs: tuple[Op, Call]) -> list[float]:
        """Seconds of forward and backward of each of these, in turns, the least of a few."""
        steps = [partial(_there_and_back, *run, [t for t in each_tensor(run[1]) if t.requires_grad]) for run in runs]
        return least_seconds(steps, _REPEATS, self._task.device)

    def _cast_of(self, tensor: Tensor) -> float:
        """Seconds of a cast of so many elements, with the one back that its gradient needs."""
        size = 1 << max(tensor.numel() - 1, 0).bit_length()
        if size not in self._cast_seconds:
            sample = torch.zeros(tensor.numel(), dtype=torch.float32, device=tensor.device)
            there_and_back = partial(_cast_there_and_back, sample, self._decisions.low)
            with disable_casts(), torch.no_grad():
                (self._cast_seconds[size],) = least_seconds([there_and_back], _REPEATS, self._task.device)
        return self._cast_seconds[size] if tensor.requires_grad else self._cast_seconds[size] / 2


def _there_and_back(function: Op, call: Call, leaves: list[Tensor]) -> None:
    """Forward and backward of an op, down to `leaves`."""
    args, kwargs = call
    outs = [t for t in each_tensor((function(*args, **kwargs),)) if t.requires_grad and t.is_floating_point()]
    if outs and leaves:
        torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)


def _cast_there_and_back(sample: Tensor, low: torch.dtype) -> None:
    sample.to(low).to(torch.float32)


def _as_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the arguments as they are before the call; what the op may write (running statistics) is copied."""
    found: Call = map_tensors((args, kwargs), lambda t: t if t.requires_grad else t.detach().clone())
    return found


def _copied(call: Call, *, detach: bool = False, cast: frozenset[int] = frozenset(), dtype: torch.dtype | None = None) -> Call:
    """Return the call with tensors of its own, with or without gradients; those at the positions `cast` in `dtype`."""
    at = itertools.count()

    def copy(tensor: Tensor) -> Tensor:
        low = dtype is not None and next(at) in cast
        fresh = tensor.detach().to(dtype if low else tensor.dtype, copy=True)
        return fresh.requires_grad_() if tensor.requires_grad and not detach else fresh

    found: Call = map_tensors(call, copy)
    return found


def _saved(function: Op, call: Call, low: torch.dtype | None = None, cast: frozenset[int] = frozenset()) -> int:
    """Return the bytes that the op saves for backward, its parameters left out and their copies counted.

    What is computed and at a position of `cast` comes in `low`.
    """
    at = itertools.count()

    def fresh(tensor: Tensor) -> Tensor:
        position = next(at)
        copy = tensor.detach().clone()
        if not tensor.requires_grad:
            return copy
        copy.requires_grad_()
        if tensor.is_leaf:
            return copy
        return copy.to(low) if low is not None and position in cast else copy.clone()

    args, kwargs = map_tensors(call, fresh)
    return saved_by(partial(function, *args, **kwargs))


def _work(function: Op, call: Call) -> int:
    """Return the floating-point operations of the products that the call makes."""
    args, kwargs = call
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return int(counter.get_total_flops())


def _form(value: Any) -> Any:
    """Return what identifies calls of one form."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad, value.is_leaf, value.is_contiguous()
    if isinstance(value, (list, tuple)):
        return tuple(_form(each) for each in value)
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
