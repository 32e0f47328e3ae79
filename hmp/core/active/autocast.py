"""torch.autocast next to hmp's policies: the inner one takes precedence. Its state is read, set and restored here.

- A policy that becomes active inside contexts of torch.autocast turns them off until it ends: `Suspension`.
- A disabled context of torch.autocast turns hmp's casts off: `Paused`.
- Where hmp casts, `torch.is_autocast_enabled()` is True and `torch.get_autocast_dtype()` is the policy's low-precision dtype, because
  libraries ask before they build their float32 autocast-disabled blocks. Code in the torch package gets torch's own answer: it asks in
  order to copy, save or restore torch.autocast's real state (checkpoint, DataParallel, torch.compile and its guards, CUDA graphs). The one
  exception is torch.amp.custom_fwd, which asks in order to build an autocast-disabled block. A wrapper around a model (DeepSpeed's engine)
  gets torch's own answer too: it asks which context it is in, and opens one around the whole model.
- An entry such as `gru.autocast` enables torch.autocast for one call of the op: `call_enabled()`.

What cannot be reached: `from torch import is_autocast_enabled` from before the patch and `torch._C.is_autocast_enabled` give torch's own
answer; an autocast context that was entered before hmp first patched anything is not seen; an object that was made before then and that
torch disabled itself (`torch.autocast("cuda")` without CUDA) counts as a request to disable; a library that copies the state itself
(`torch.autocast(enabled=torch.is_autocast_enabled())`) switches torch.autocast on; an interrupt (Ctrl-C) at the very end of a
torch.autocast context, which torch wrote in Python, leaves torch's state and hmp's alike in it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch.amp import autocast_mode

from ..log import caller as opener
from ..log import log, should_log
from ..patching import patches
from ..torch_private import AUTOCAST_INIT, CUSTOM_BACKWARD, CUSTOM_FORWARD, devices_in_autocast, dynamo_foldable, is_any_autocast_enabled
from .state import EnteredRegion, Off, PolicyTable, Running, call_under, current_state

P = ParamSpec("P")
R = TypeVar("R")

# torch's own, taken before anything is patched
is_enabled: Callable[..., bool] = torch.is_autocast_enabled
_dtype: Callable[[str], torch.dtype] = torch.get_autocast_dtype
_is_cached: Callable[[], bool] = torch.is_autocast_cache_enabled
_set_enabled: Callable[[str, bool], None] = torch.set_autocast_enabled
_set_dtype: Callable[[str, torch.dtype], None] = torch.set_autocast_dtype
_set_cached: Callable[[bool], None] = torch.set_autocast_cache_enabled
_clear_cache: Callable[[], None] = torch.clear_autocast_cache
_nest: Callable[[], int] = torch.autocast_increment_nesting
_unnest: Callable[[], int] = torch.autocast_decrement_nesting


_State = tuple[str, bool, torch.dtype, bool]  # torch.autocast's for a device type: enabled, dtype, and whether casts are cached


class _Entered(NamedTuple):
    """A context of torch.autocast that this thread is in."""

    context: Any  # torch's object, which may be entered many times
    asked: bool | None  # whether it is to enable torch.autocast; None where it counts as outside of the active policy
    changed: EnteredRegion | None  # hmp's state inside, where it is another one
    place: str  # file and line of the code that entered it


class _Thread(threading.local):
    entered: tuple[_Entered, ...] = ()  # innermost first
    suspensions: tuple[Suspension, ...] = ()  # those that have not ended
    outside_op: _State | None = None  # the state outside of the op that torch.autocast is enabled for
    make_traced: Callable[[str, torch.dtype], Any] | None = None  # makes contexts while this thread traces for torch.compile


_thread = _Thread()


# --- a policy that becomes active inside contexts of torch.autocast -----------------------------------------------------------


class Suspension:
    """Turns torch.autocast off in this thread for a policy that becomes active inside contexts of it, until `end()`.

    A generator that is suspended in `hmp.casts()` may be closed in another thread, or in other contexts: nothing is turned on there.

    Attributes:
        policies: How many policies are active in these contexts.
        place: The contexts.
    """

    def __init__(self) -> None:
        self.policies, self.place, self._devices = 1, _place(), devices_in_autocast()
        _thread.suspensions = (*_thread.suspensions, self)
        for device in self._devices:
            _set_enabled(device, False)

    def end(self) -> None:
        """End it for one policy. After the last one torch.autocast is on again in the contexts that it was on in."""
        self.policies -= 1
        if self.policies == 0:
            _thread.suspensions = tuple(each for each in _thread.suspensions if each is not self)
            for device in self._devices if self.place == _place() else ():
                _set_enabled(device, True)


def _place() -> tuple[int, int, tuple[_Entered, ...]]:
    """Return which contexts of torch.autocast this thread is in."""
    try:
        return threading.get_ident(), _nest(), _thread.entered
    finally:
        _unnest()


def suspended() -> Iterable[Suspension]:
    """Turn torch.autocast off until the returned Suspension's `end()`; return none where it is on in no context."""
    if is_any_autocast_enabled():
        return (Suspension(),)
    for each in _thread.suspensions:
        if each.place == _place():  # of two tasks in one thread, one may end before the other
            each.policies += 1
            return (each,)
    return ()


def call_innermost(state: PolicyTable | Off, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function` while `state` is active and contexts of torch.autocast around it are off, and return its result.

    Copies of casts last as long as the outermost such call. The contexts stay on if `state` is that of the active policy for other
    modules, by its scoped entries: no policy becomes active then.
    """
    is_same_policy = state.scope_id != 0 and state.scope_id == current_state().scope_id
    call, suspensions = Running(), () if is_same_policy else suspended()
    try:
        return call_under(state, function, *args, **kwargs)
    finally:
        for each in suspensions:
            each.end()
        call.end()


# --- torch.autocast for one op --------------------------------------------------------------------------------------------


def call_enabled(device: str, dtype: torch.dtype, cached: bool, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function`, an op, with torch.autocast enabled, and return its result. User Python in it runs outside (`in_outer()`).

    torch's cache of casts does not notice writes: what is `cached` is forgotten at the end, and nothing from before is used. While this
    thread traces for torch.compile, the graph records the context.
    """
    if _thread.make_traced is not None:
        with _thread.make_traced(device, dtype):
            return function(*args, **kwargs)
    try:
        if cached:
            _clear_cache()
        return _call_in((device, True, dtype, cached), True, function, args, kwargs)
    finally:
        if cached:
            _clear_cache()


def in_outer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, the user's callback such as a saved-tensor hook, run under the state from before the op around it."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        outside = _thread.outside_op
        return function(*args, **kwargs) if outside is None else _call_in(outside, False, function, args, kwargs)

    return called


def _call_in(state: _State, is_op: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    device, around = state[0], _thread.outside_op
    before = device, is_enabled(device), _dtype(device), _is_cached()
    try:
        _thread.outside_op = before if is_op else None
        _put(*state)
        return function(*args, **kwargs)
    finally:
        _put(*before)
        _thread.outside_op = around


def _put(device: str, enabled: bool, dtype: torch.dtype, cached: bool) -> None:
    _set_enabled(device, enabled)
    _set_dtype(device, dtype)
    _set_cached(cached)


def is_in_op() -> bool:
    """Return True if this thread is in `call_enabled()`: an autocast kernel excludes its key, so that what it calls finds it disabled."""
    return _thread.outside_op is not None


@contextlib.contextmanager
def traced_by(make: Callable[[str, torch.dtype], Any]) -> Iterator[None]:
    """Context manager inside which `call_enabled()` enters the contexts of `make(device, dtype)`, which are recorded in a graph."""
    before, _thread.make_traced = _thread.make_traced, make
    try:
        yield
    finally:
        _thread.make_traced = before


# --- contexts of torch.autocast inside a policy ---------------------------------------------------------------------------


class Paused(Off):
    """The state inside `torch.autocast(enabled=False)`: nothing is cast. `torch.autocast(enabled=True)` inside it turns casts on again."""

    __slots__ = ()

    def __init__(self, on: PolicyTable) -> None:
        super().__init__(on)
        self.off = on.off  # torch.autocast(enabled=True) does not turn on what disable_casts() inside the context turned off
        self.in_backward = on.in_backward  # as outside the context, where a gradient may have another dtype than a weight, too


# Those of hmp's contexts that have not ended: after a revert no patch sees their end.
_changed_states: WeakSet[EnteredRegion] = WeakSet()
_logged = False
# What install() is given: whether a context that a frame enters is around an applied model's forward, and whether a wrapper around a model
# asks there.
_is_around_applied: Callable[[Any, types.FrameType], bool]
_is_of_wrapper: Callable[[types.FrameType], bool]


def install(is_around_applied: Callable[[Any, types.FrameType], bool], is_of_wrapper: Callable[[types.FrameType], bool]) -> None:
    """Patch torch.autocast and the functions that ask for its state, until patches.restore().

    To be called after imports.fill_tables(), so that torch's tables that are keyed by function have torch's own functions as keys.
    """
    global _is_around_applied, _is_of_wrapper
    _is_around_applied, _is_of_wrapper = is_around_applied, is_of_wrapper
    patches.on_restore(_forget)
    for name in _DEVICES:
        original = getattr(torch, name, None)
        if original is not None:
            asked = functools.update_wrapper(_answering(original), original)
            asked.__module__ = "torch"
            answers[asked] = original
            patches.rebind(torch, name, asked)
    patches.wrap(autocast_mode.autocast, "__enter__", _enter)
    patches.wrap(autocast_mode.autocast, "__exit__", _exit)
    patches.wrap(autocast_mode, "is_autocast_available", _noting_requests)


def _forget() -> None:
    """Undo what patches.restore() does not: torch.compile may have made a table of functions while the answers were in torch's places."""
    global _logged
    _logged = False
    for changed in list(_changed_states):
        changed.now = None
    current_state()  # in this thread the next reader finds none of them
    for each in _thread.suspensions:
        each.policies = 1
        each.end()
    _thread.entered = ()
    constants = dynamo_foldable()
    for asked in answers.keys() & constants.keys():
        constants[answers[asked]] = constants.pop(asked)
    answers.clear()


def state_inside(current: PolicyTable | Off, enabled: bool) -> PolicyTable | Off:
    """Return the state inside a torch.autocast context that is entered where `current` is active."""
    if enabled:
        return current.on if isinstance(current, Paused) else current
    if current.disabled:
        return current if isinstance(current, Paused) else current.off
    return Paused(current.on)


def _enter(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def enter(self: Any) -> Any:
        result = original(self)
        current, frame, place = current_state(), sys._getframe(2), "{}:{}".format(*opener())  # frame 1 is that of patches.wrap()
        asked = self._enabled or hasattr(self, "_hmp_asked")
        chosen = state_inside(current, asked)
        if frame.f_code is CUSTOM_BACKWARD:
            chosen = _of_forward(frame) or current  # torch restores the forward's state, which is not a request
        is_outside = self._enabled and chosen.policy is not None and _is_around_applied(self, frame)
        if is_outside:
            _set_enabled(self.device, False)  # its end restores what was before
        elif self._enabled and chosen.policy is not None:
            _log_once(place)
        changed = EnteredRegion(chosen) if chosen is not current else None
        _thread.entered = (_Entered(self, None if is_outside else asked, changed, place), *_thread.entered)
        if changed is not None:
            _changed_states.add(changed)
            changed.begin()
        return result

    return enter


def _exit(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, *exc_info: Any) -> Any:
        # None where it was entered before hmp's patch, or in another thread
        entered = next((each for each in _thread.entered if each.context is self), None)
        try:
            return original(self, *exc_info)
        finally:
            if entered is not None:
                _thread.entered = tuple(each for each in _thread.entered if each is not entered)
                if entered.changed is not None:
                    entered.changed.end()

    return leave


def opened_at(enabled: bool) -> str:
    """File and line of the innermost enabled or disabled context that this thread is in; "" where that was entered before the patches."""
    return next((each.place for each in _thread.entered if each.asked == enabled), "")


def _of_forward(frame: types.FrameType) -> PolicyTable | None:
    """Return the policy under which the forward of this torch.amp.custom_bwd ran; None for none, and after a change of the policy."""
    table, policy = getattr(frame.f_locals["args"][0], "_hmp_forward", (None, None))
    return table if table is not None and table.policy == policy else None


def _noting_requests(original: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return an `is_autocast_available` that notes the autocast objects whose constructor calls it with enabled=True.

    torch.autocast("cuda") without CUDA disables itself, which does not ask to turn casts off.
    """

    def is_autocast_available(device_type: str) -> bool:
        frame = sys._getframe(2)
        if frame.f_code is AUTOCAST_INIT and frame.f_locals["enabled"]:
            frame.f_locals["self"]._hmp_asked = True
        return original(device_type)

    return is_autocast_available


def log_if_enabled() -> None:
    """Log, once, that torch.autocast is enabled, if it is where this is called. To be called by convert(), which is outermost."""
    if is_any_autocast_enabled():
        _log_once("a line that ran before hmp.convert()")


def _log_once(place: str) -> None:
    global _logged
    if not _logged and should_log():
        log.warning(
            "torch.autocast, opened at %s, is enabled where hmp casts, and overrides hmp on the ops of torch's lists; to reverse this, "
            "enter hmp.casts(), or call an applied model, inside the autocast context",
            place,
        )
    _logged = True


# --- questions for torch.autocast's state ---------------------------------------------------------------------------------

# name → the device type that it is about, "" where an argument says so
_DEVICES = {
    "is_autocast_enabled": "",
    "is_autocast_cpu_enabled": "cpu",
    "is_autocast_xla_enabled": "xla",
    "get_autocast_dtype": "",
    "get_autocast_gpu_dtype": "cuda",
    "get_autocast_cpu_dtype": "cpu",
    "get_autocast_xla_dtype": "xla",
}
# What hmp puts in the places of these → torch's own.
answers: dict[Callable[..., Any], Callable[..., Any]] = {}


def _answering(original: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        really, state, frame = original(*args, **kwargs), current_state(), sys._getframe(1)
        if state.policy is None:
            return really
        if frame.f_code is CUSTOM_FORWARD and isinstance(really, bool):
            if frame.f_locals["cast_inputs"] is not None:
                return True  # an autocast-disabled block: torch.amp.custom_fwd enters torch.autocast(enabled=False)
            # for custom_bwd, on autograd's ctx, where custom_fwd keeps its own notes
            frame.f_locals["args"][0]._hmp_forward = state, state.policy
        if is_torchs(frame.f_globals.get("__name__") or "") or _is_of_wrapper(frame):
            return really
        return answer(original, state.policy, *args, **kwargs)

    return asked


def is_torchs(module: str) -> bool:
    """Return True if code of the module gets torch's own answers."""
    return module == "torch" or module.startswith("torch.")


def answer(original: Callable[..., Any], policy: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what `original`, `torch.is_autocast_enabled` or the like, is to return to the user's code where `policy` is active."""
    if original.__name__.startswith("is_"):
        return True
    device = _DEVICES[original.__name__]
    return original(*args, **kwargs) if (is_enabled(device) if device else is_enabled(*args, **kwargs)) else policy.dtype


def unpatched(function: Any) -> Any:
    """Return torch's own function for what answers in its place, and any other object as it is."""
    return answers.get(function, function) if isinstance(function, types.FunctionType) else function
