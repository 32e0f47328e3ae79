"""Compares each recorded call with its entry: what it asks for, what ran, and who made the difference."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...core import lists, locks
from ...core.active import autocast, state
from ...core.active.state import Off, PolicyTable
from ...core.casting import dtype_name, each_castable, each_tensor
from ...core.observe import Call, asked_dtype, modules
from ...core.policy.entries import ListEntry
from ...core.policy.policy import Policy
from ...core.policy.precedence import Listed
from ...core.policy.scopes import unwrapped
from ...core.rules import registry
from ...core.rules.op import OpUnderRule
from ...core.torch_patches import module_calls
from ...core.torch_patches.module_calls import APPLIED, AppliedPolicy
from ...core.torch_private import is_any_autocast_enabled
from ..op_owners import place_here
from .rows import Violation, together


class Overrider(NamedTuple):
    """What overrode a list.

    `kind` is "region" (an enabled torch.autocast context), "island" (a disabled one), "disable_casts" or "outside" (of an applied model's
    calls); `words` say which, with the line that opened a context.
    """

    kind: str
    words: str


def over_casts() -> Overrider | None:
    """Who casts once more what hmp has cast: a torch.autocast context; None for nobody."""
    return Overrider("region", f"torch.autocast, enabled{_opened(enabled=True)}") if is_any_autocast_enabled() else None


def _policy_in(table: PolicyTable, running: Iterable[torch.nn.Module]) -> Any:
    """Return the policy that would be active in calls of the modules `running`, outermost first, inside `table`; None for none."""
    is_around = table.policy is None  # outside of all policies
    for module in running:
        found: AppliedPolicy | None = vars(module).get(APPLIED)
        if found is not None:
            table = (found.applied if is_around else None) or found.scoped.get(table.scope_id) or table
    return table.policy


@functools.lru_cache(1)
def _wholes(changes: int) -> weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module]]:
    """Return the applied model of each submodule of one; `changes` is how often a module has got a policy."""
    found: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module]] = weakref.WeakKeyDictionary()
    for whole in module_calls.applied_models():
        found.update((part, weakref.ref(whole)) for part in whole.modules() if part is not whole)
    return found


def in_place_of_casts() -> Overrider | None:
    """Return who has switched casts off; None if they are on, or hmp did for torch's own code, which no list covers."""
    here = state.current_state()
    if isinstance(here, autocast.Paused):
        return Overrider("island", f"torch.autocast(enabled=False){_opened(enabled=False)}") if here.disabled else None
    entered = state.get()  # after current_state(), which removes blocks that have ended
    is_users = isinstance(entered, state.EnteredRegion) and entered.key is not None
    return Overrider("disable_casts", "disable_casts()") if here.disabled and is_users else None


def _opened(enabled: bool) -> str:
    place = autocast.opened_at(enabled)
    return f" at {place}" if place else ""


_LOW = frozenset(("bfloat16", "float16"))
_WIDE = (torch.float64, torch.complex64, torch.complex128)
_LEFT = Overrider("torch", "hmp, which left the call to torch")
Given = tuple[Any, ...]  # the arguments of a call


class OverrideRecorder:
    """Notes the calls that ran otherwise than the list says that decides their dtype; in any thread.

    An entry such as one of the FP8 list is followed by the low-precision dtype too, where FP8 cannot be. The promote list leaves the
    dtype to the inputs.
    """

    def __init__(self) -> None:
        self._lock = locks.RLock()
        self._counts: dict[Violation, int] = {}
        self._listed: dict[int, tuple[Policy, Callable[[str], ListEntry | None]]] = {}  # by id, with what looks an op up
        self._has_rounded = False  # whether hmp may have made a tensor in a low-precision dtype

    def found(self) -> list[Violation]:
        """Return what was noted so far, most calls first."""
        with self._lock:
            return together(replace(violation, calls=calls) for violation, calls in self._counts.items())

    def decided(self, call: Call, ruled: OpUnderRule, given: Given) -> None:
        """Note a call of an op that hmp decided by `rule`."""
        policy = call.here.policy
        if policy is not None and ruled.rule.is_list:
            overrider, got = _LEFT, call.computed
            if call.lacks_kernel:
                words = f"the device, which has no {dtype_name(ruled.low_dtype)} kernel for it (R11)"
                overrider, got = Overrider("no_kernel", words), "float32"
            self._check(policy, ruled.op, got, over_casts() or overrider, given, call.result)
            if ruled.rule is registry.FP32_LIST:
                self._look_at_inputs(policy, ruled.op, given, call.result)
        made, came = ({dtype_name(tensor.dtype) for tensor in each_castable(each)} for each in ((call.result,), given))
        self._has_rounded |= not _LOW.isdisjoint(made) and "float32" in came

    def _look_at_inputs(self, policy: Policy, op: str, given: Given, result: Any) -> None:
        """Note an op on the FP32 list whose weight or input came in a low-precision dtype, rounded before.

        An input that is not a weight may be of hmp's making, once hmp has made one.
        """
        results = list(each_tensor((result,)))
        lows = [each for each in each_castable(given) if dtype_name(each.dtype) in _LOW and all(each is not one for one in results)]
        rounded: torch.Tensor | None = next((each for each in lows if isinstance(each, torch.nn.Parameter)), None)
        if rounded is None and not self._has_rounded:
            rounded = next(iter(lows), None)
        entry = None if rounded is None else self._entry(policy, op)
        if rounded is not None and entry is not None and registry.of_entry(entry) is registry.FP32_LIST:
            low = dtype_name(rounded.dtype)
            words = f"a weight stored in {low}" if isinstance(rounded, torch.nn.Parameter) else f"an input in {low}"
            overrider = Overrider("rounded_before", words)
            self._note(op, entry.source, "float32", f"float32, on values already rounded to {low}", overrider)

    def past(self, call: Call) -> None:
        """Note a call of torch's own function by a name that Python code took before."""
        overrider = Overrider("bypassed", "a reference taken before hmp patched torch")
        self._check(call.here.policy, call.op, call.computed, overrider, call.given, call.result)

    def uncast(self, call: Call) -> None:
        """Note a call where no casts are active."""
        op, got, given, result = call.op, call.computed, call.given, call.result
        if not state.current_state().disabled:
            self._outside_of_calls(op, got, given, result)
            return
        overrider, here = in_place_of_casts(), state.current_state()
        policy = _policy_in(here.on, modules.running) if overrider is not None and isinstance(here, Off) else None
        if overrider is not None and policy is not None:
            self._check(policy, op, got, overrider, given, result)

    def _outside_of_calls(self, op: str, got: str, given: Given, result: Any) -> None:
        """Note a call without an active policy. In a submodule of an applied model somebody called a part of it, or another method."""
        running = modules.running
        whole = _wholes(module_calls.changes()).get(running[-1]) if running else None
        model = None if whole is None else whole()
        applied = module_calls.applied(model)
        if model is not None and applied is not None and applied.applied is not None:
            words = f"a part of {type(unwrapped(model)).__name__}, called directly instead of through the model"
            outside = Overrider("outside", words)
            self._check(_policy_in(applied.applied, running), op, got, outside, given, result)

    def begin_backward(self) -> None:
        """Note a call of backward() inside a torch.autocast context, which casts there, too."""
        region = over_casts()
        if region is not None and self._listed:
            self._note("backward()", "", "the dtypes of forward", "those of torch's lists", region)

    def _check(self, policy: Policy | Any, op: str, got: str, overrider: Overrider, given: Given, result: Any) -> None:
        """Note the call if it did not follow the entry that the policy has for the op."""
        entry = self._entry(policy, op)
        if entry is None or not got:
            return
        kind = lists.kind_of(entry.list_name)
        wanted = None if kind.rule.dtype is None else kind.rule.dtype(policy.dtype)
        if wanted is None:
            return
        dtypes = got.split(", ")
        if entry.is_autocasts and _LOW.isdisjoint({*dtypes} - {dtype_name(wanted)}):
            return  # torch.autocast decides inside the op
        if dtype_name(wanted) in dtypes or dtypes[0] in map(dtype_name, kind.computes_in) or asked_dtype(given):
            return
        tensors, results = list(each_tensor(given)), list(each_tensor((result,)))
        if any(tensor.dtype in _WIDE for tensor in tensors):
            return  # left to torch
        if any(each is tensor for each in results for tensor in tensors):
            return  # in place and out=: the first input's dtype counts
        if overrider.kind != "region" and results and all(each.dtype is wanted for each in results):
            return  # a look-up, whose table is not cast, and what saturates
        self._note(op, entry.source, dtype_name(wanted), got, overrider)

    def _entry(self, policy: Policy, op: str) -> ListEntry | None:
        known = self._listed.get(id(policy))
        if known is None:
            known = self._listed[id(policy)] = policy, functools.cache(Listed(policy).entry)
        return known[1](op)

    def _note(self, op: str, source: str, wanted: str, got: str, overrider: Overrider) -> None:
        violation = Violation(op, source, wanted, got, overrider.kind, overrider.words, *place_here())
        with self._lock:
            self._counts[violation] = self._counts.get(violation, 0) + 1
