"""What is noted of every call while a record() is on: an observer of hmp's decisions, and a mode for what no list decides."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...core import fork_safe
from ...core.active import Off, PolicyTable, state
from ...core.cast_cache import hits_here as casts_saved
from ...core.casting import Caster, Tensor, castable, each_castable, each_tensor
from ...core.convert import Observer, Op, OpRule
from ...core.formatting import dtype_name
from ...core.patching import unpatched_op
from ...core.policy import EVERY_OP, LISTS, Listed, ListEntry, Policy, spelling
from ...core.rules import rules
from ...core.torch_ops import name_of, sites
from ...core.torch_private import (
    function_mode_at,
    function_mode_stack,
    function_modes,
    in_plain_autograd,
    is_profiled,
    pop_function_mode,
    push_function_mode,
)
from ..diagnostics import fallbacks_of, overriding, replaces_autocast
from .bounded_places import ELSEWHERE, BoundedPlaces
from .in_fp8 import Fp8Rows
from .kept_packed import KeptRows
from .kernels import Kernels, call_key, nbytes_of, waiting
from .last_word import LastWord
from .models import RunningModels
from .rows import PAST, UNLISTED, Row, grouped

Key = tuple[Any, ...]
_short = {dtype: dtype_name(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_long = {name: dtype for dtype, name in _short.items()}
_STOP = "_StopRecomputationError"  # what torch's checkpointing ends its recomputation with
_MOST_KERNELS = 4096
_clock = time.perf_counter
_compiling = torch.compiler.is_compiling
_Parameter = torch.nn.Parameter
_NO_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


class _Call:
    """What is known of the call that is running."""

    __slots__ = ("bytes", "cast_seconds", "casts", "compute", "in_float32", "op_seconds", "saved")

    def __init__(self) -> None:
        self.casts = self.saved = self.bytes = self.in_float32 = 0
        self.cast_seconds = self.op_seconds = 0.0
        self.compute = ""


class Recorder(Observer):
    """Counts every call in every thread, until it is told no more. Unlisted ops are seen in the thread that records."""

    def __init__(self, synchronize: bool = False) -> None:
        self.started = _clock()
        self.modules = RunningModels()
        self.policies: dict[Policy, None] = {}  # as they were given
        self._in_force: dict[int, Policy] = {}  # by id: equal ones may come from other lines
        self._as_given: dict[tuple[int, int], Policy] = {}  # by the ids of what is in force and of what was given
        self.mode: TorchFunctionMode | None = None  # what tells of ops that no list decides
        self.uncast = 0
        self.unplaced = 0  # calls in later places than are kept
        self.fp8 = Fp8Rows()
        self.kept = KeptRows(lambda: self.modules.path)
        self.places = BoundedPlaces(self.modules)
        self.last_word = LastWord(self.modules, self.places)
        self._counts: dict[Key, list[Any]] = {}
        self._lock = fork_safe.RLock()
        self._threads = threading.local()
        self._names: dict[Any, str] = {}
        self.no_ops: set[Any] = set()  # functions of torch's that are none
        self._kernels: dict[Key, Kernels] = {}  # by what a call that torch.autocast decides was given
        self._wait = waiting() if synchronize else None

    @property
    def seconds(self) -> float:
        """How long it has recorded."""
        return _clock() - self.started

    # --- what hmp tells ---

    def casting(self, caster: Caster) -> Caster:
        """`caster`, whose casts are counted and timed."""

        def counting(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            call: _Call | None = getattr(self._threads, "call", None)
            if call is None or tensor.dtype is dtype:
                return caster(tensor, dtype)
            hits = casts_saved()
            started = self._now()
            if is_profiled():
                with torch.profiler.record_function(f"hmp::cast {_short[tensor.dtype]} to {_short[dtype]}"):
                    copy = caster(tensor, dtype)
            else:
                copy = caster(tensor, dtype)
            call.cast_seconds += self._now() - started
            if casts_saved() == hits:
                call.casts += 1
                call.bytes += nbytes_of(tensor)
            else:
                call.saved += 1
            return copy

        return counting

    def calling(self, op: Op, rule: OpRule) -> Op:
        """torch's own op, or the product in FP8 in its place, whose dtype and time are noted."""
        own = getattr(op, "computes", None)  # of a product in FP8
        computes = "" if own is None else _short[own]
        low_of = getattr(op, "computes_in_float32", None)

        def timed(*args: Any, **kwargs: Any) -> Any:
            call: _Call | None = getattr(self._threads, "call", None)
            if call is None:
                return op(*args, **kwargs)
            given = args if not kwargs else (*args, *kwargs.values())
            call.compute = computes or _asked_dtype(given) or _first_dtype(given)
            if computes:
                kwargs["observer"] = self.fp8.observer(rule.op, self.places.here().module, kwargs.get("observer"))
            if low_of is not None and low_of(args, kwargs) is not None:
                call.in_float32 = 1
            started = self._now()
            try:
                return op(*args, **kwargs)
            finally:
                call.op_seconds += self._now() - started

        timed.computes, timed.computes_in_float32 = own, low_of  # type: ignore[attr-defined]  # for a recording inside this one
        return timed

    def _autocasts(self, call: _Call, wrapper: Op, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The wrapper's result; what torch.autocast does inside the op, or a region of it around the op, is looked at once for calls with
        such arguments."""
        if _compiling() or not in_plain_autograd():
            result = wrapper(*args, **kwargs)
            # what runs inside is not seen; the result of an op on a list tells what a region made of it
            call.compute = "" if rule.kind is rules.AUTOCAST or _compiling() else _dtypes((result,))
            return result
        key = (rule.op, rule.low_dtype, torch.is_grad_enabled(), overriding.over_casts(), *call_key(args, kwargs))
        seen = self._kernels.get(key)
        if seen is None:
            own, own_bytes = call.casts, call.bytes
            with Kernels() as seen:
                result = wrapper(*args, **kwargs)
            seen.casts -= call.casts - own  # those that hmp makes itself are counted where they are made
            seen.cast_bytes -= call.bytes - own_bytes
            if len(self._kernels) < _MOST_KERNELS:
                self._kernels[key] = seen
        else:
            result = wrapper(*args, **kwargs)
        call.compute = ", ".join(_short[dtype] for dtype in seen.dtypes)
        call.casts += seen.casts
        call.bytes += seen.cast_bytes
        return result

    def around(self, wrapper: Op, rule: OpRule) -> Op:
        """`wrapper`, whose calls are counted."""
        said = rule.kind.in_reports or UNLISTED

        def observed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._threads, "call", None) is not None:
                return wrapper(*args, **kwargs)  # hmp's own, on the way to an op
            modes = function_modes()
            if not modes or function_mode_at(modes - 1) is not self.mode:
                return self._observed(wrapper, rule, said, args, kwargs)
            # nothing inside is told of by the mode, and in force it makes four microseconds of each reading of a tensor's dtype
            try:  # an interrupt may come right after the call
                pop_function_mode()
                return self._observed(wrapper, rule, said, args, kwargs)
            finally:
                push_function_mode(self.mode)

        return observed

    def _observed(self, wrapper: Op, rule: OpRule, said: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The wrapper's result; the call is noted."""
        here = state.current_state()
        given = (*args, *kwargs.values())
        inputs = _dtypes(given)
        lacking = fallbacks_of(rule.op)
        call = self._threads.call = _Call()
        result: Any = None
        raised = 1
        region = overriding.over_casts()
        if rule.kind is rules.AUTOCAST:
            is_autocast = not replaces_autocast(rule, list(each_castable(given)))
        else:
            is_autocast = region is not None and rule.kind.dtype is not None
        began = self._now()
        try:
            result = self._autocasts(call, wrapper, rule, args, kwargs) if is_autocast else wrapper(*args, **kwargs)
            raised = 0
            return result
        except Exception as error:
            raised = int(type(error).__name__ != _STOP)
            raise
        finally:
            self._threads.call = None
            output = "" if raised else _dtypes((result,))
            if is_autocast and not call.op_seconds:
                call.op_seconds = self._now() - began  # the op was called by a wrapper inside the wrapper
            lacked = min(max(fallbacks_of(rule.op) - lacking, 0), 1)  # other threads count too
            if said == UNLISTED and not lacked:
                call.compute = _computed(given, inputs, result)
            self._note(here, (rule.op, said, inputs, call.compute, output), call, lacked, raised)
            if not raised and not _compiling():
                self.last_word.decided(here, rule, call.compute, bool(lacked), region, given, result)

    # --- what no list decides ---

    def unlisted(self, function: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a torch function that hmp does not stand in for."""
        if getattr(self._threads, "call", None) is not None:
            return function(*args, **kwargs)
        name = self._names.get(function)
        if name is None:
            name = name_of(function)
            if not name:
                if len(self.no_ops) < _MOST_KERNELS:
                    self.no_ops.add(function)
                return function(*args, **kwargs)
            self._names[function] = name
        here = state.current_state()
        if here.policy is None:
            self.uncast += 1
            result = function(*args, **kwargs)
            given = (*args, *kwargs.values())
            self.last_word.rounded.notice_cast(name, given, result)
            self.last_word.uncast(name, _computed(given, _dtypes(given), result), given, result)
            return result
        inputs = _dtypes((*args, *kwargs.values()))
        started = self._now()
        counted = self.observed
        result = function(*args, **kwargs)
        if self.observed != counted or not isinstance(result, (Tensor, tuple, list)) or isinstance(result, torch.Size):
            return result  # hmp decided something inside, which was noted; or nothing was computed
        self.last_word.rounded.notice_cast(name, args, result)
        call = _Call()
        call.op_seconds = self._now() - started
        output = _dtypes((result,))
        call.compute = _computed((*args, *kwargs.values()), inputs, result)
        rule = PAST if function in here.replacements.functions else UNLISTED
        if rule == PAST:
            self.last_word.past(here.policy, name, call.compute, (*args, *kwargs.values()), result)
        if inputs or output:
            self._note(here, (name, rule, inputs, call.compute, output), call, 0, 0)
        return result

    observed = 0  # calls noted so far

    def _note(self, here: PolicyTable | Off, key: Key, call: _Call, no_kernel: int, raised: int) -> None:
        policy, given = here.policy, here.user_policy
        if policy is None or given is None:
            return  # reverted since the call began
        traced = 1 if _compiling() else 0
        place = self.places.here()
        key = (id(policy), *key, *place)
        with self._lock:
            self.observed += 1
            if place is ELSEWHERE:
                self.unplaced += 1
            if (id(policy), id(given)) not in self._as_given:
                self._as_given[id(policy), id(given)] = given
                self._in_force.setdefault(id(policy), policy)
                self.policies.setdefault(given)
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = [0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0]  # in the order of rows.COUNTED
            counts[0] += 1
            counts[1] += call.casts
            counts[2] += call.saved
            counts[3] += call.bytes
            counts[4] += call.op_seconds
            counts[5] += call.cast_seconds
            counts[6] += no_kernel
            counts[7] += raised
            counts[8] += traced
            counts[9] += call.in_float32

    def _now(self) -> float:
        if self._wait is not None:
            self._wait()
        return _clock()

    # --- what comes of it ---

    def rows(self) -> list[Row]:
        """What was noted so far, in the order of first calls."""
        found = []
        for entry, op, rule, *rest in self._entries():
            if rule == UNLISTED and entry is not None and entry.cast == "promote":
                rule = rules.PROMOTE.in_reports  # torch itself promotes: no wrapper is needed
            follows = entry is not None and (rule in (entry.cast, PAST) or (rule == rules.AUTOCAST.in_reports and entry.is_autocasts))
            source = entry.source if follows else ""
            found.append(Row(op, rule, source, *rest))
        return grouped(found, "call")  # policies that are the same in other modules make the same rows

    def _entries(self) -> list[tuple[Any, ...]]:
        """What was noted, each with the list entry that its op follows."""
        with self._lock:
            counts = [(*key, *values) for key, values in self._counts.items()]
            listed = {key: Listed(policy) for key, policy in self._in_force.items()}
        return [(listed[policy].source(op) or listed[policy].star, op, *rest) for policy, op, *rest in counts]

    def never_called(self) -> list[str]:
        """The entries on the lists of the policies in force none of whose ops was called, of those with a scope none where they hold."""
        noted = self._entries()
        called = {relative for _, op, *_ in noted for relative in sites.ancestry(op)}
        names = {name for policy in self.policies for cast in LISTS for name in getattr(policy, cast) if name != EVERY_OP}
        unused = [name for name in names if called.isdisjoint(spelling.resolve(ListEntry(name, "bf16")))]
        # of a line that another one took a part of, what is left has the names of its ops
        followed = {(entry.cast, entry.scope, entry.name) for entry, *_ in noted if entry is not None}
        for rule in {rule for policy in self.policies for rule in policy.scoped}:
            if rule.cast == "saved":
                continue  # self.kept tells what such lines did
            if followed.isdisjoint((rule.cast, rule.scope, name) for name in (rule.name, *spelling.resolve(rule))):
                unused.append(rule.text)
        return sorted(unused)


class Unlisted(TorchFunctionMode):
    """Tells a recorder of every torch function that is called in the thread that made this."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        recorder.mode = self
        self._thread = threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = unpatched_op(func)  # a wrapper has called it
        # most of what arrives here reads a tensor's dtype and the like, hmp's own code before all
        if func in self._recorder.no_ops:
            return func(*args, **(kwargs or {}))
        return self._recorder.unlisted(func, args, kwargs or {})

    def in_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, a backward pass, with the mode in force for the user's Python that it calls: torch has taken it out of force."""
        if threading.get_ident() != self._thread or self in function_mode_stack():
            return run

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._recorder.last_word.begin_backward()
            with self:
                return run(*args, **kwargs)

        self._recorder.last_word.runs_backward.add(watched.__code__)
        return watched


def _dtypes(values: Iterable[Any]) -> str:
    """The dtypes of the castable tensors among `values`, each once, in order."""
    found: dict[torch.dtype, None] = {}
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is _Parameter:
            if castable(value):
                found[value.dtype] = None
        elif kind not in _NO_TENSORS:
            found.update((tensor.dtype, None) for tensor in each_castable((value,)))
    return _short[next(iter(found))] if len(found) == 1 else ", ".join([_short[dtype] for dtype in found])


def _first_dtype(values: tuple[Any, ...]) -> str:
    """The dtype of the first castable tensor, "" without one."""
    first = values[0] if values and type(values[0]) is Tensor and castable(values[0]) else next(each_castable(values), None)
    return "" if first is None else _short[first.dtype]


def _asked_dtype(values: tuple[Any, ...]) -> str:
    """The floating dtype that `dtype=` names, which the inputs are cast to before torch computes; "" where none is."""
    for value in values:
        if type(value) is torch.dtype and value.is_floating_point:
            return _short[value]
    return ""


def _computed(values: tuple[Any, ...], inputs: str, result: Any) -> str:
    """The dtype that torch computes in by itself: the one that it was asked for, or that it promotes a mixture to, or a wider result's."""
    asked = _asked_dtype(values)
    if asked or not inputs:
        return asked
    dtypes = [_long[name] for name in inputs.split(", ")]
    widest = functools.reduce(torch.promote_types, dtypes)
    given = next((tensor.dtype for tensor in each_tensor((result,)) if tensor.is_floating_point()), widest)
    return _short[given if len(dtypes) > 1 or torch.promote_types(widest, given) is given else widest]
