"""record(), a report of what runs in which precision for as long as its `with` lasts, and what it notes of every call; verify()."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...core import lists, locks
from ...core.casting import dtype_name, each_tensor
from ...core.compiler_stance import running_uncompiled
from ...core.log import log, should_log
from ...core.observe import Call, Listener, asked_dtype, dtypes_of, listen
from ...core.policy import presets
from ...core.policy.entries import EVERY_OP, ListEntry
from ...core.policy.names import ops_of
from ...core.policy.policy import Policy
from ...core.policy.precedence import Listed
from ...core.policy.scopes import of_user
from ...core.rules import registry
from ...core.rules.op import CastRule
from ...core.torch_private import without_torch_function
from .. import model_call
from ..formatting import provenance
from ..model_state import default_device, preserve_state
from ..op_owners import place_here
from .models import RunningModels
from .overrides import OverrideRecorder
from .report import Report
from .rows import BYPASSED, UNLISTED, Row, check_allowed, grouped, report_parts

Key = tuple[Any, ...]
Loss = Callable[[Any], torch.Tensor]
_LONG = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_STOP = "_StopRecomputationError"  # what torch's checkpointing ends its recomputation with
_clock = time.perf_counter
_compiling = torch.compiler.is_compiling


class Recorder(Listener):
    """Counts every call in every thread, until it gets no more reports. Unlisted ops are seen in the thread that records."""

    measures = unlisted = in_backward = True

    def __init__(self, synchronize: bool = False) -> None:
        self.synchronizes = synchronize
        self.started = _clock()
        self.models = RunningModels()
        # what is active and what was given, by their ids: equal ones may come from other lines
        self._policies: dict[tuple[int, int], tuple[Policy, Policy]] = {}
        self.uncast = 0
        self.parts = {name: part.recording() for name, part in report_parts().items()}
        self._columns = lists.columns()
        self.last_word = OverrideRecorder()
        self._counts: dict[Key, list[Any]] = {}
        self._lock = locks.RLock()

    def end(self, call: Call) -> None:
        """Count a call."""
        ruled = call.ruled
        if ruled is None:
            if call.error is None:
                self._unlisted(call)
            return
        rule, given, raised = _reported(call, ruled.rule), call.given, call.error is not None
        inputs, output = dtypes_of(given), "" if raised else dtypes_of((call.result,))
        if rule is None and not call.lacks_kernel:
            call.computed = _computed(given, inputs, call.result)
        self._note(call, rule, inputs, output, raised and type(call.error).__name__ != _STOP)
        if not raised and not _compiling():
            self.last_word.decided(call, ruled, given)

    def backward_begins(self) -> None:
        """Look for what overrides the policy in backward."""
        self.last_word.begin_backward()

    def _unlisted(self, call: Call) -> None:
        """Note a call of a torch function that no list decides."""
        result, is_cast_off = call.result, call.here.policy is None
        computes = isinstance(result, (torch.Tensor, tuple, list)) and not isinstance(result, torch.Size)
        if not computes or (call.decided and not is_cast_off):
            return  # nothing was computed; or hmp decided something inside, which was noted
        inputs = dtypes_of(call.given)
        call.computed = _computed(call.given, inputs, result)
        if is_cast_off:
            self.uncast += 1
            self.last_word.uncast(call)
        elif call.function in call.here.replacements.functions:
            self.last_word.past(call)
            self._note(call, BYPASSED, inputs, dtypes_of((result,)), False)
        else:
            self._note(call, None, inputs, dtypes_of((result,)), False)

    def _note(self, call: Call, rule: CastRule | str | None, inputs: str, output: str, raised: bool) -> None:
        policy, given = call.here.policy, call.here.user_policy
        if policy is None or given is None:
            return  # reverted since the call began
        key = (id(policy), call.op, rule, inputs, call.computed, output, *place_here())
        with self._lock:
            self._policies.setdefault((id(policy), id(given)), (policy, given))
            counts = self._counts.setdefault(key, [0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, {}])  # in the order of rows.COUNTED, then `more`
            times = call.op_seconds, call.cast_seconds
            counted = 1, call.casts, call.casts_saved, call.cast_bytes, *times, call.lacks_kernel, raised, call.in_float32
            for at, value in enumerate(counted):
                counts[at] += value
            for name, of in self._columns.items():
                if value := of(call):
                    counts[9][name] = counts[9].get(name, 0) + value

    # --- what comes of it ---

    @property
    def policies(self) -> list[Policy]:
        """Return the policies that were active, as they were given."""
        return list(dict.fromkeys(given for _, given in self._policies.values()))

    def told(self, name: str) -> Any:
        """Return what a report has by that name, as far as it is known."""
        known: dict[str, Callable[[], Any]] = {
            "rows": self.rows,
            "violations": self.last_word.found,
            "models": lambda: self.models.found,
            "policies": lambda: [policy.to_dict() for policy in self.policies],
            "never_called": self.never_called,
            "uncast_calls": lambda: self.uncast,
            "seconds": lambda: _clock() - self.started,
            **{name: part.rows for name, part in self.parts.items()},
        }
        return known[name]()

    def rows(self) -> list[Row]:
        """Return what was noted so far, in the order of first calls."""
        found = []
        for entry, op, rule, inputs, *rest in self._entries():
            if not inputs:
                continue  # a list could cast nothing
            asked = None if entry is None else registry.of_entry(entry)
            if rule is None and asked is registry.PROMOTE:
                rule = asked  # torch itself promotes: no wrapper is needed
            source = entry.source if entry is not None and rule in (asked, BYPASSED) else ""
            label = rule.label if isinstance(rule, CastRule) and not rule.is_list else ""
            found.append(replace(Row(op, _name_of(rule), source, inputs, *rest), label=label))
        return grouped(found, "call")  # policies that are the same in other modules make the same rows

    def _entries(self) -> list[tuple[Any, ...]]:
        """Return what was noted, each with the list entry that its op follows."""
        with self._lock:
            counts = [(*key, *values[:-1], dict(values[-1])) for key, values in self._counts.items()]
            listed = {active: Listed(policy) for (active, _), (policy, _) in self._policies.items()}
        return [(listed[policy].source(op) or listed[policy].star, op, *rest) for policy, op, *rest in counts]

    def never_called(self) -> list[str]:
        """Return the user's entries on the active policies' lists that no call followed. A preset's have the ops of many models."""
        followed = {(entry.list_name, entry.scope, entry.name) for entry, *_ in self._entries() if entry is not None}
        entries: set[ListEntry] = set()
        for policy in self.policies:
            unscoped = (entry for name in lists.names() for entry in policy.casts_by_op(name).values())
            entries.update(of_user(policy), (entry for entry in unscoped if entry.name != EVERY_OP and not presets.is_in_one(entry.path)))
        return sorted(
            entry.text
            for entry in entries
            # what a list adds is in a part of the report; an entry that another one took a part of goes on under the names of its ops
            if not lists.kind_of(entry.list_name).adds
            and followed.isdisjoint((entry.list_name, entry.scope, name) for name in (entry.name, *ops_of(entry)))
        )


def _reported(call: Call, rule: CastRule) -> CastRule | None:
    """Return the rule, or None if it has left this call to torch."""
    return rule if rule.in_reports and (call.saturates or rule not in (registry.FILL, registry.GUARD)) else None


def _name_of(rule: CastRule | str | None) -> str:
    return UNLISTED if rule is None else rule if isinstance(rule, str) else rule.in_reports


@functools.cache
def _promoted(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that torch promotes the two to. No mode of the user's sees the question."""
    with without_torch_function():
        return torch.promote_types(one, other)


def _computed(values: tuple[Any, ...], inputs: str, result: Any) -> str:
    """Return the dtype that torch computes in by itself.

    The one that it was asked for, or that it promotes a mixture to, or a wider result's.
    """
    asked = asked_dtype(values)
    if asked or not inputs:
        return asked
    dtypes = [_LONG[name] for name in inputs.split(", ")]
    widest = functools.reduce(_promoted, dtypes)
    floating = (t.dtype for t in each_tensor((result,)) if t.dtype.is_floating_point and t.dtype.itemsize > 1)  # float8 promotes to nothing
    given = next(floating, widest)
    return dtype_name(given if len(dtypes) > 1 or _promoted(widest, given) is given else widest)


@contextmanager
def record(*, synchronize: bool = False) -> Iterator[Report]:
    """Record which dtype each op runs in: all ops of this thread, and of other threads the ops that hmp handles.

    The report can be read inside the block and after it, also after an exception. Recordings can be nested; each has its own report.
    Outside of a recording there is no cost. Compiled models run uncompiled inside.

    Args:
        synchronize: Synchronise with the accelerator around each op and cast, so that times are those of its kernels. Without it they are
            the calling thread's.

    Yields:
        The report.

    Example:
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> with hmp.casts("autocast"), hmp.record() as report:
        ...     y = net(x)
        >>> report.assert_dtype("linear", torch.bfloat16)
    """
    recorder = Recorder(synchronize)
    report = Report((), (), (), device=default_device().type, **provenance())
    report._recorder = recorder
    try:
        with running_uncompiled(), listen(recorder, recorder.models, *recorder.parts.values()):
            yield report
    finally:
        recorder.models.close()
        report._end()


def verify(
    model: torch.nn.Module,
    batch: Any,
    policy: Policy | str | Path | None = None,
    *,
    loss: Loss | None = None,
    allow: Collection[str] = (),
) -> Report:
    """Run one step of a model, forward and backward, and verify that every call follows its list.

    This is `record()`, one step, and `Report.verify()`. Torch, the model, gradients and the random state are as before when it returns;
    meanwhile the weights take their memory twice. Compiled code runs uncompiled.

    Args:
        model: The module.
        batch: What the model is called with: a mapping as keywords, a tuple or list as positional arguments, anything else as the only one.
        policy: What it runs under. Default: what hmp.apply() gave the model, or the active policy.
        loss: Makes a scalar of what the model returns. Default: the output's `.loss`, else the sum of its floating tensors. Under
            `torch.no_grad()` the forward alone is run.
        allow: Kinds of violations that do not raise, see `Report.verify()`.

    Returns:
        The report of the step; `report.never_called` has the entries of yours that no call matched, which are logged, too.

    Raises:
        ViolationError: Calls did not follow their lists.
        HmpError: No op on a list was called, so nothing was verified, or the model has lazy modules that were never called.

    Example:
        >>> report = hmp.verify(torch.nn.Linear(4, 4), torch.randn(2, 4), "autocast")
    """
    model_call.check_module(model, "verify()")
    check_allowed(allow)
    region: Any = nullcontext() if policy is None else model_call.policy_context(model, model_call.chosen_policy(model, policy), model)
    with preserve_state(model, model.parameters()), record() as report:
        with region:
            output = model_call.call(model, batch)
            value = _loss_of(output, loss) if torch.is_grad_enabled() else None
            if value is not None:
                model_call.check_loss(value, "loss(output)" if loss is not None else "the sum of the model's output")
        if value is not None and value.requires_grad:
            value.backward()
    report.verify(allow)
    if report.never_called and should_log():
        log.warning("hmp.verify():%s", report.never_called_notice.replace("\n", " "))
    return report


def _loss_of(output: Any, loss: Loss | None) -> torch.Tensor | None:
    found = loss(output) if loss is not None else model_call.own_loss(output)
    if found is not None:
        return found
    sums = [tensor.sum() for tensor in each_tensor((output,)) if tensor.requires_grad]
    return sum(sums[1:], sums[0]) if sums else None
