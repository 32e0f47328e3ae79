"""R17: `torch.is_autocast_enabled()` and the like answer for hmp's casts too, and disabled torch.autocast contexts turn hmp's casts off.

Where hmp casts, `torch.is_autocast_enabled()` is True and `torch.get_autocast_dtype()` is the policy's low-precision dtype, because
libraries ask before they build their float32 autocast-disabled blocks. Code in the torch package gets torch's own answer: it asks in order
to copy, save or restore torch.autocast's real state (checkpoint, DataParallel, torch.compile and its guards, CUDA graphs). The one
exception is torch.amp.custom_fwd, which asks in order to build an autocast-disabled block. A wrapper around a model (DeepSpeed's engine)
gets torch's own answer too: it asks which context it is in, and opens one around the whole model.

What cannot be reached: `from torch import is_autocast_enabled` from before the patch and `torch._C.is_autocast_enabled` give torch's own
answer; an autocast context that was entered before hmp first patched anything is not seen; an object that was made before then and that
torch disabled itself (`torch.autocast("cuda")` without CUDA) counts as a request to disable; a library that copies the state itself
(`torch.autocast(enabled=torch.is_autocast_enabled())`) switches torch.autocast on; an interrupt (Ctrl-C) at the very end of a
torch.autocast context, which torch wrote in Python, leaves torch's state and hmp's alike in it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.amp import autocast_mode

from ..active import EnteredRegion, Off, PolicyTable, Suspension, state, suspensions
from ..casting import each_tensor
from ..log import caller as opener
from ..log import log, should_log
from ..patching import patches
from ..torch_private import AUTOCAST_CAST, dynamo_foldable
from ..torch_private import is_any_autocast_enabled as _any_really_enabled
from .model_wrappers import CALLS, frames, is_around_applied, is_of_wrapper

_QUESTIONS = ("is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_xla_enabled")
# name → the device type that it is about, "" where an argument says so
_DTYPES = {
    "get_autocast_dtype": "",
    "get_autocast_gpu_dtype": "cuda",
    "get_autocast_cpu_dtype": "cpu",
    "get_autocast_xla_dtype": "xla",
}

_really_enabled: Callable[..., bool] = torch.is_autocast_enabled


def _code_inside(function: Any, name: str, *variables: str) -> types.CodeType | None:
    """Return the body of `name` inside `function`, None where it is not there or has other variables."""
    for constant in function.__code__.co_consts:
        if isinstance(constant, types.CodeType) and constant.co_name == name:
            return constant if {*variables} <= {*constant.co_varnames, *constant.co_freevars} else None
    return None


# Private facts of torch. Functions that custom_fwd and custom_bwd decorated may be older than hmp's patches; they are recognised by the
# code object that they share.
FORWARD = _code_inside(autocast_mode.custom_fwd, "decorate_fwd", "args", "cast_inputs")
BACKWARD = _code_inside(autocast_mode.custom_bwd, "decorate_bwd", "args")
_INIT: types.CodeType = autocast_mode.autocast.__init__.__code__

# Autocast objects that were asked to enable; torch disables those that it has no device or dtype for.
_asked_to_enable: WeakSet[Any] = WeakSet()


class _Entered(NamedTuple):
    """One entering of a torch.autocast context."""

    region: Any  # torch's object, which may be entered many times
    changed: EnteredRegion | None  # hmp's context, where the state inside is another one
    suspension: Suspension | None  # where the context counts as outside of the active policy
    place: str  # file and line of the code that entered it


# Those that this context is in, innermost first.
_entered: ContextVar[tuple[_Entered, ...]] = ContextVar("hmp_autocast", default=())
# Those of hmp's contexts that have not ended: after a revert no patch sees their end.
_regions: WeakSet[EnteredRegion] = WeakSet()
_answers: dict[Callable[..., Any], Callable[..., Any]] = {}
_said = False


class Paused(Off):
    """The state inside `torch.autocast(enabled=False)`: nothing is cast. `torch.autocast(enabled=True)` inside it turns casts on again."""

    __slots__ = ()

    @property
    def off(self) -> Off:
        """Return an `Off`: torch.autocast(enabled=True) does not turn on what `disable_casts()` inside the context turned off."""
        return self.on.off

    @property
    def in_backward(self) -> Off:
        """As outside the context, where a gradient may have another dtype than a weight, too."""
        return self.on.in_backward


def install() -> None:
    """Patch torch.autocast and the functions that ask for its state, until patches.restore().

    To be called after late_imports.fill_tables(), so that torch's tables that are keyed by function have torch's own functions as keys.
    """
    patches.on_restore(_forget)
    patches.on_restore(suspensions.end_all)
    for name in _QUESTIONS:
        _answer(name, _enabled)
    for name, device_type in _DTYPES.items():
        _answer(name, functools.partial(_low_dtype, device_type=device_type))
    cls: Any = autocast_mode.autocast
    for owner, name, make in (
        (cls, "__enter__", _enter),
        (cls, "__exit__", _exit),
        (autocast_mode, "is_autocast_available", _noting_requests),
        (*AUTOCAST_CAST, _cast_of_every_device),
    ):
        patches.wrap(owner, name, make)
    if FORWARD is None or BACKWARD is None or "enabled" not in _INIT.co_varnames:
        log.warning("hmp does not know the torch.amp of torch %s; ops that custom_fwd keeps in float32 may be cast", torch.__version__)


def say_if_enabled() -> None:
    """Log, once, that torch.autocast is enabled, if it is where this is called. To be called by convert(), which is outermost."""
    if _any_really_enabled():
        _say_once("a line that ran before hmp.convert()")


def _answer(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(torch, name, None)
    if original is None:
        return
    answer = functools.update_wrapper(make(original), original)
    answer.__module__ = "torch"
    _answers[answer] = original
    patches.rebind(torch, name, answer)


def _forget() -> None:
    """Undo what patches.restore() does not: torch.compile may have made a table of functions while the answers were in torch's places."""
    global _said
    _said = False
    for changed in list(_regions):
        changed.now = None
    state.current_state()  # in this thread the next reader finds none of them
    constants = dynamo_foldable()
    for answer, original in _answers.items():
        if answer in constants:
            constants[original] = constants.pop(answer)
    _answers.clear()


def _enabled(original: Callable[..., bool]) -> Callable[..., bool]:
    def answer(*args: Any, **kwargs: Any) -> bool:
        really = original(*args, **kwargs)
        frame = sys._getframe(1)
        policy = state.current_state().policy
        if policy is None:
            return really
        if frame.f_code is not FORWARD:
            return really or not _asks_for_torchs(frame)
        if frame.f_locals["cast_inputs"] is not None:
            return True  # an autocast-disabled block: torch.amp.custom_fwd enters torch.autocast(enabled=False)
        # for custom_bwd, on autograd's ctx, where custom_fwd keeps its own notes
        frame.f_locals["args"][0]._hmp_forward = state.current_state(), policy
        return really

    return answer


def _low_dtype(original: Callable[..., torch.dtype], device_type: str) -> Callable[..., torch.dtype]:
    def answer(*args: Any, **kwargs: Any) -> torch.dtype:
        dtype = original(*args, **kwargs)
        policy = state.current_state().policy
        if policy is None or _asks_for_torchs(sys._getframe(1)):
            return dtype
        really = _really_enabled(device_type) if device_type else _really_enabled(*args, **kwargs)
        low: torch.dtype = policy.dtype
        return dtype if really else low

    return answer


def _asks_for_torchs(frame: types.FrameType) -> bool:
    return is_torchs(frame.f_globals.get("__name__") or "") or is_of_wrapper(frames(frame, CALLS))


def is_torchs(module: str) -> bool:
    """Return True if code of the module gets torch's own answers."""
    return module == "torch" or module.startswith("torch.")


def own(function: Any) -> Any:
    """Return torch's own function for what answers in its place, and any other object as it is."""
    return _answers.get(function, function) if isinstance(function, types.FunctionType) else function


def answers() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that hmp puts in the places of `torch.is_autocast_enabled` and the like, each with torch's own."""
    return dict(_answers)


def answer(original: Callable[..., Any], policy: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what `original`, `torch.is_autocast_enabled` or the like, is to return to the user's code where `policy` is active."""
    if original.__name__ in _QUESTIONS:
        return True
    device_type = _DTYPES[original.__name__]
    really = _really_enabled(device_type) if device_type else _really_enabled(*args, **kwargs)
    return original(*args, **kwargs) if really else policy.dtype


def inside(current: PolicyTable | Off, enabled: bool) -> PolicyTable | Off:
    """Return the state inside a torch.autocast context that is entered where `current` is active."""
    return _resumed(current) if enabled else _paused(current)


def _enter(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def enter(self: Any) -> Any:
        result = original(self)
        current = state.current_state()
        caller = sys._getframe(2)  # frame 1 is that of patches.wrap()
        chosen = inside(current, self._enabled or self in _asked_to_enable)
        if caller.f_code is BACKWARD:
            chosen = _of_forward(caller) or current  # torch restores the forward's state, which is not a request
        suspensions.entered(self)
        suspension, place = None, "{}:{}".format(*opener())
        if self._enabled and chosen.policy is not None:
            if is_around_applied(self, frames(caller)):
                suspension = suspensions.suspend()
            else:
                _say_once(place)
        changed = EnteredRegion(chosen) if chosen is not current else None
        _entered.set((_Entered(self, changed, suspension, place), *_entered.get()))
        if changed is not None:
            _regions.add(changed)
            changed.begin()
        return result

    return enter


def _exit(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, *exc_info: Any) -> Any:
        entered = _entered.get()
        # None where it was entered before hmp's patch, or in another context
        index = next((i for i, each in enumerate(entered) if each.region is self), None)
        if index is None:
            return suspensions.leave(self, original, self, *exc_info)
        _, changed, suspension, _ = entered[index]
        try:
            if suspension is not None:
                suspension.end()
            return suspensions.leave(self, original, self, *exc_info)
        finally:
            if changed is not None:
                changed.end()
            _entered.set((*entered[:index], *entered[index + 1 :]))

    return leave


def opened_at(enabled: bool) -> str:
    """File and line of the innermost enabled or disabled context that this context is in; "" where that was entered before the patches."""
    asked = (each for each in _entered.get() if enabled == (each.region._enabled or each.region in _asked_to_enable))
    return next((each.place for each in asked if each.suspension is None), "")


def _paused(current: PolicyTable | Off) -> PolicyTable | Off:
    if not current.disabled:
        return Paused(current.on)
    return current if isinstance(current, Paused) else current.off


def _resumed(current: PolicyTable | Off) -> PolicyTable | Off:
    return current.on if isinstance(current, Paused) else current


def _of_forward(frame: types.FrameType) -> PolicyTable | None:
    """Return the policy under which the forward of this torch.amp.custom_bwd ran; None for none, and after a change of the policy."""
    ctx = frame.f_locals["args"][0]
    compiled, policy = getattr(ctx, "_hmp_forward", (None, None))
    return compiled if compiled is not None and compiled.policy == policy else None


def _noting_requests(original: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return an `is_autocast_available` that notes the autocast objects whose constructor calls it with enabled=True.

    torch.autocast("cuda") without CUDA disables itself, which does not ask to turn casts off.
    """

    def is_autocast_available(device_type: str) -> bool:
        caller = sys._getframe(2)
        if caller.f_code is _INIT and caller.f_locals.get("enabled"):
            _asked_to_enable.add(caller.f_locals["self"])
        return original(device_type)

    return is_autocast_available


def _cast_of_every_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_cast` for custom_fwd(device_type="cuda"), which leaves CPU tensors alone.

    In a block where only hmp casts, it casts tensors of every device.
    """

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        device_types = [device_type]
        if sys._getframe(2).f_code is FORWARD and isinstance(state.current_state(), Paused):
            tensors = each_tensor(value.values() if isinstance(value, dict) else value)
            device_types = [*{t.device.type for t in tensors} | {device_type}]
        for each in device_types:
            value = original(value, each, dtype)
        return value

    return cast


def _say_once(place: str) -> None:
    global _said
    if not _said and should_log():
        log.warning(
            "torch.autocast, opened at %s, is enabled where hmp casts, and overrides hmp on the ops of torch's lists; to reverse this, "
            "enter hmp.casts(), or call an applied model, inside the autocast context",
            place,
        )
    _said = True
