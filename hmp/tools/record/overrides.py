"""Compares each recorded call with its entry: what it asks for, what ran, and who made the difference."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...core import lists, locks
from ...core.active import autocast, state
from ...core.active.state import InBackward, Off, PolicyTable
from ...core.casting import castable, dtype_name, each_castable, each_tensor
from ...core.log import PACKAGES
from ...core.observe import RUNS_BACKWARD, Call, modules
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
from .rows import OverrideKind, Violation, together


class Overrider(NamedTuple):
    """What overrode a list.

    `kind` is "region" (an enabled torch.autocast context), "island" (a disabled one), "disable_casts", "outside" (of an applied model's
    calls) or "backward"; `words` say which, with the line that opened a context.
    """

    kind: OverrideKind
    words: str


def over_casts() -> Overrider | None:
    """Who casts once more what hmp has cast: a torch.autocast context; None for nobody."""
    return Overrider(OverrideKind.REGION, f"torch.autocast, enabled{_opened(enabled=True)}") if is_any_autocast_enabled() else None


def overridden(running: Iterable[torch.nn.Module]) -> Any:
    """Return the policy in whose place casts are off here, inside calls of the modules `running`, outermost first; None for none."""
    here = state.current_state()
    return _policy_in(here.on, running) if isinstance(here, Off) else None


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


def outside_of(model: torch.nn.Module) -> Overrider:
    """Who called a part of the applied `model` outside of its calls: the method of it that runs, where one does."""
    model = unwrapped(model)
    steps = module_calls.frames(sys._getframe(1))
    method = next((f"{step.code.co_name}() of " for step in steps if step.local("".join(step.code.co_varnames[:1])) is model), "")
    return Overrider(OverrideKind.OUTSIDE, f"{method}{type(model).__name__}, called directly instead of through the model")


def is_around_a_forward() -> bool:
    """Return True if a hook of a module runs here, or the code of a wrapper around a model, and not a model's own forward."""
    steps = list(module_calls.frames(sys._getframe(1), module_calls.CALLS))
    torchs = (i for i, step in enumerate(steps) if step.code.co_filename == module_calls.TORCHS)
    called = next(torchs, None)
    return called is not None and (called == 0 or module_calls.is_of_wrapper(steps))


def in_place_of_casts() -> Overrider | None:
    """Return who has switched casts off; None if they are on, or hmp did for torch's own code, which no list covers."""
    here = state.current_state()
    if isinstance(here, autocast.Paused):
        return Overrider(OverrideKind.ISLAND, f"torch.autocast(enabled=False){_opened(enabled=False)}") if here.disabled else None
    if isinstance(here, InBackward):
        return Overrider(OverrideKind.BACKWARD, "autograd's backward, in which lists don't apply to Python code (R13)")
    return Overrider(OverrideKind.DISABLE_CASTS, "disable_casts()") if here.disabled and state.is_by_user() else None


def _opened(enabled: bool) -> str:
    place = autocast.opened_at(enabled)
    return f" at {place}" if place else ""


_LOW = frozenset(("bfloat16", "float16"))
_CASTS = frozenset(("to", "type", "type_as", "bfloat16", "half"))
_WIDE = (torch.float64, torch.complex64, torch.complex128)
_LEFT = Overrider(OverrideKind.TORCH, "hmp, which left the call to torch")
Given = tuple[Any, ...]  # the arguments of a call


class RoundedBefore:
    """Which inputs of a recorded op were rounded by somebody else than hmp.

    Until an op has first made a low-precision dtype of float32, every tensor in a low-precision dtype came so. From then on such a tensor
    may be of hmp's making; what a module's hook or a wrapper around a model (FSDP2, DeepSpeed) casts is not, and is noted.
    """

    def __init__(self) -> None:
        self._any_by_hmp = False
        self._others = WeakTensorKeyDictionary()

    def notice(self, given: tuple[Any, ...], result: Any) -> None:
        """Note a call that hmp decided."""
        if not self._any_by_hmp and _is_any_low(result):
            self._any_by_hmp = any(tensor.dtype is torch.float32 for tensor in each_castable(given))

    def notice_cast(self, name: str, given: tuple[Any, ...], result: Any) -> None:
        """Note a call of torch's function `name` where no list decides."""
        is_cast = name in _CASTS and given and _is_any_low(result) and castable(given[0]) and given[0].dtype is torch.float32
        if is_cast and is_around_a_forward():
            self._others[result] = True

    def before(self, given: tuple[Any, ...], result: Any) -> tuple[str, str]:
        """Return the low-precision dtype that a weight or an input of the call came in, and which of them it was in words; "" for none."""
        results = list(each_tensor((result,)))
        lows = [each for each in each_castable(given) if dtype_name(each.dtype) in _LOW and all(each is not one for one in results)]
        for tensor in lows:
            if isinstance(tensor, torch.nn.Parameter):
                return dtype_name(tensor.dtype), f"a weight stored in {dtype_name(tensor.dtype)}"
        for tensor in lows:
            if tensor in self._others:
                return dtype_name(tensor.dtype), f"a hook or a wrapper that casts its input to {dtype_name(tensor.dtype)}"
            if not self._any_by_hmp:
                return dtype_name(tensor.dtype), f"an input in {dtype_name(tensor.dtype)}"
        return "", ""


def _is_any_low(result: Any) -> bool:
    return any(dtype_name(tensor.dtype) in _LOW for tensor in each_castable((result,)))


class OverrideRecorder:
    """Notes the calls that ran otherwise than the list says that decides their dtype; in any thread.

    An entry such as one of the FP8 list is followed by the low-precision dtype too, where FP8 cannot be. The promote list leaves the
    dtype to the inputs.
    """

    def __init__(self) -> None:
        self._lock = locks.RLock()
        self._counts: dict[Violation, int] = {}
        self._listed: dict[int, tuple[Policy, Callable[[str], ListEntry | None]]] = {}  # by id, with what looks an op up
        self._users: dict[int, Policy] = {}  # the users' policies, by id
        self.rounded = RoundedBefore()

    def found(self) -> list[Violation]:
        """Return what was noted so far, most calls first."""
        with self._lock:
            return together(replace(violation, calls=calls) for violation, calls in self._counts.items())

    def decided(self, call: Call, ruled: OpUnderRule, given: Given) -> None:
        """Note a call of an op that hmp decided by `rule`."""
        policy, user_policy = call.here.policy, call.here.user_policy
        if user_policy is not None:
            self._users[id(user_policy)] = user_policy
        if policy is not None and ruled.rule.is_list:
            overrider, got = _LEFT, call.computed
            if call.lacks_kernel:
                words = f"the device, which has no {dtype_name(ruled.low_dtype)} kernel for it (R11)"
                overrider, got = Overrider(OverrideKind.NO_KERNEL, words), "float32"
            self._check(policy, ruled.op, got, over_casts() or overrider, given, call.result)
            if ruled.rule is registry.FP32_LIST:
                self._look_at_inputs(policy, ruled.op, given, call.result)
        self.rounded.notice(given, call.result)

    def _look_at_inputs(self, policy: Policy, op: str, given: Given, result: Any) -> None:
        """Note an op on the FP32 list whose weight or input came in a low-precision dtype, rounded before."""
        low, words = self.rounded.before(given, result)
        entry = self._entry(policy, op) if low else None
        if entry is not None and registry.of_entry(entry) is registry.FP32_LIST:
            self._note(
                op, entry.source, "float32", f"float32, on values already rounded to {low}", Overrider(OverrideKind.ROUNDED_BEFORE, words)
            )

    def past(self, call: Call) -> None:
        """Note a call of torch's own function by a name that Python code took before."""
        overrider = Overrider(OverrideKind.BYPASSED, "a reference taken before hmp patched torch")
        self._check(call.here.policy, call.op, call.computed, overrider, call.given, call.result)

    def uncast(self, call: Call) -> None:
        """Note a call where no casts are active."""
        op, got, given, result = call.op, call.computed, call.given, call.result
        if not state.current_state().disabled:
            self._outside_of_calls(op, got, given, result)
            return
        overrider = in_place_of_casts()
        if overrider is None or (overrider.kind == OverrideKind.BACKWARD and self._is_torchs()):
            return
        policy = overridden(modules.running)
        if policy is not None:
            self._check(policy, op, got, overrider, given, result)
            return
        outside = {each.unscoped for each in list(self._users.values())}
        if overrider.kind == OverrideKind.BACKWARD and len(outside) == 1:  # of several policies it may have been any
            self._check(outside.pop(), op, got, overrider, given, result)

    def _outside_of_calls(self, op: str, got: str, given: Given, result: Any) -> None:
        """Note a call without an active policy. In a submodule of an applied model somebody called a part of it, or another method."""
        running = modules.running
        whole = _wholes(module_calls.changes()).get(running[-1]) if running else None
        model = None if whole is None else whole()
        applied = module_calls.applied(model)
        if model is not None and applied is not None and applied.applied is not None:
            self._check(_policy_in(applied.applied, running), op, got, outside_of(model), given, result)

    def _is_torchs(self) -> bool:
        """Return True if torch's own Python calls here, in backward: of DDP, FSDP or checkpoints."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(PACKAGES):
            if frame.f_code is RUNS_BACKWARD:
                return True
            frame = frame.f_back
        return False

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
        if dtype_name(wanted) in dtypes or dtypes[0] in map(dtype_name, kind.computes_in) or _is_asked(given):
            return
        tensors, results = list(each_tensor(given)), list(each_tensor((result,)))
        if any(tensor.dtype in _WIDE for tensor in tensors):
            return  # left to torch
        if any(each is tensor for each in results for tensor in tensors):
            return  # in place and out=: the first input's dtype counts
        if overrider.kind != OverrideKind.REGION and results and all(each.dtype is wanted for each in results):
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


def _is_asked(given: tuple[Any, ...]) -> bool:
    """Return True if `dtype=` names a floating dtype, which wins over the list."""
    return any(type(value) is torch.dtype and value.is_floating_point for value in given)
