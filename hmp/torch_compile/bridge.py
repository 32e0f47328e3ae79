"""torch.compile and strict torch.export see hmp: compiled code holds the casts of eager, and is guarded on what is in force.

While a frame is traced each call of an op goes through the wrapper that eager has for it (torch_dynamo.Call), so that there is no
second set of rules. torch._dynamo takes seconds to import: the bridge is put in place when somebody else imports it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..context import CompiledPolicy, InBackward, Off, Region, regions, state, without_casts
from ..dispatch import deciding, placement, switches, user_functions
from ..errors import HmpError
from ..lists import Policy
from ..ops import op_facts
from ..patching import patches, stands_in
from ..torch_hooks import autocast, late_imports, module_calls
from ..wrapping import op_wrap
from . import dynamo_internals, dynamo_names, traced_call

module = __name__  # where Dynamo's guards find `key`
region_type = Region


class Muted(Off):
    """No casts, because what runs holds its casts already; `traced` is what a frame that is compiled in there is traced under."""

    __slots__ = ("traced",)

    def __init__(self, traced: CompiledPolicy | Off) -> None:
        super().__init__(traced.on)
        self.traced = traced


def traced() -> CompiledPolicy | Off:
    """What is in force for the program that is being compiled here."""
    here = state.here()
    return here.traced if isinstance(here, Muted) else here


def muted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose calls cast nothing, and which may compile what was in force where it was called."""
    return lambda *args, **kwargs: state.call_under(Muted(traced()), function, *args, **kwargs)


def muted_graph(graph: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that casts nothing more."""
    return functools.wraps(graph)(without_casts(graph))


# --- what compiled code is guarded on ---------------------------------------------------------------------------------------


# Numbers of policies by their contents: the same lists are the same number again, unless very many others were in force since.
_numbers: dict[Policy, int] = {}
_number_of: dict[int, tuple[Policy, int]] = {}  # id → policy, kept alive, and number: a policy takes a while to hash
_next_number = functools.partial(next, itertools.count(1))
_MOST_NUMBERS = 256


def key() -> tuple[Any, ...]:
    """What compiled code depends on, in the calling thread or task: the policy and whether it is on, what it is for the modules of
    a model, and what was registered or applied."""
    here = traced()
    how = 0 if not here.disabled else 3 if isinstance(here, autocast.Paused) else 2 if isinstance(here, InBackward) else 1
    policy = here.policy if how == 0 else here.on.policy
    return (how, _number(policy), here.scope_id, user_functions.changes(), module_calls.changes())


def _number(policy: Policy | None) -> int:
    if policy is None:
        return 0
    known = _number_of.get(id(policy))
    if known is None:
        if len(_number_of) >= _MOST_NUMBERS:
            _numbers.clear()
            _number_of.clear()
        if policy not in _numbers:
            _numbers[policy] = _next_number()
        known = _number_of[id(policy)] = policy, _numbers[policy]
    return known[1]


# --- what wrappers are ------------------------------------------------------------------------------------------------------


def wrapper(here: CompiledPolicy | Off, key: Any) -> Callable[..., Any] | None:
    """What is called in place of torch's function `key` under `here` while a frame is traced, None for the function itself."""
    if isinstance(here, InBackward):
        return _decided(Policy("no lists"), 0, key) if key in here.table else None
    return None if here.policy is None else _decided(here.policy, user_functions.changes(), key)


@functools.lru_cache(8192)
def _decided(policy: Policy, _: int, key: Any) -> Callable[..., Any] | None:
    decision = deciding.decide(policy).get(key)
    return None if decision is None else op_wrap(traced_call.op, decision.rule)


def decided() -> list[Any]:
    """torch's functions that have a switch."""
    return list(switches.keys())


def original(value: Any) -> Any:
    """torch's function, for what stands in its place."""
    if stands_in(value):
        return getattr(value, "__wrapped__", value)
    return value


def all_switches() -> list[Any]:
    """What stands in the place of torch's builtins."""
    return placement.in_place()


_OWN_FILES = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<hmp")


def is_own(code: types.CodeType) -> bool:
    """Whether it is code of hmp's."""
    return code.co_filename.startswith(_OWN_FILES)


def trace(modes: Any, mode: Any) -> traced_call.Trace:
    """A frame whose compilation begins, in the thread or task that called it."""
    return traced_call.Trace(modes, mode, traced())


def called(tx: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What a call of torch's becomes that Dynamo has met."""
    key = dynamo_internals.named_by(tx, fn, args[0] if args else None)
    if isinstance(key, types.FunctionType) and key.__name__ in op_facts.STRUCTURE:
        return traced_call.call_body(tx, key, args, kwargs)
    return traced_call.call(tx, fn, key, wrapper(dynamo_internals.trace_of(tx).here, key), args, kwargs)


# --- what stands for more than its code says --------------------------------------------------------------------------------


def handler(function: types.FunctionType) -> Callable[..., Any] | None:
    """What is traced for a call of `function`, which stands in the place of torch's; None for its own code."""
    if stands_in(function):
        key = inspect.getclosurevars(function).nonlocals["_key"]

        def call(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
            found = wrapper(dynamo_internals.trace_of(tx).here, key)
            return traced_call.call_composite(tx, dynamo_names.constant(tx, patches.plain(key)), found, args, kwargs)

        return call
    if function.__code__ is _QUIET:
        inner = inspect.getclosurevars(function).nonlocals["function"]
        return lambda tx, args, kwargs, source: _under(tx, lambda here: here.off, dynamo_names.constant(tx, inner), args, kwargs)
    return None


_QUIET = without_casts(lambda: None).__code__


def chosen(region: Region, here: CompiledPolicy | Off) -> CompiledPolicy | Off:
    """What is in force inside `region`, entered where `here` is."""
    return region._choose(here)


def giving(region: Region) -> Callable[[], Region]:
    """A function that gives back `region`."""
    return lambda: region


def in_autocast(here: CompiledPolicy | Off, enabled: bool) -> CompiledPolicy | Off:
    """What is in force inside a region of torch.autocast (R17)."""
    return autocast.inside(here, enabled)


def _under(
    tx: Any, choose: Callable[[CompiledPolicy | Off], CompiledPolicy | Off], function: Any, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    trace = dynamo_internals.trace_of(tx)
    with trace.under(choose(trace.here)):
        return function.call_function(tx, args, kwargs)


def _region(make: Callable[..., Any]) -> Callable[..., Any]:
    """disable_casts() and its like: a region, or a function decorated with it."""

    def call(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
        values = [dynamo_names.value_of(a) for a in args], {name: dynamo_names.value_of(a) for name, a in kwargs.items()}
        if args and callable(values[0][0]):
            return dynamo_internals.variables().Region(make()).call_function(tx, args, {})
        return dynamo_internals.variables().Region(make(*values[0], **values[1]))

    return call


def _casts_enabled(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    return dynamo_names.constant(tx, dynamo_internals.trace_of(tx).here.policy is not None)


def _quiet(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    return dynamo_internals.variables().Function(None, lambda tx, given, named, source: _without_casts(tx, [*args, *given], named))


def _without_casts(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    return _under(tx, lambda here: here.off, args[0], args[1:], kwargs)


def _call_under(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    return _under(tx, lambda here: dynamo_names.value_of(args[0]), args[1], args[2:], kwargs)


def _applied_to(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    casts = module_calls.casts_for(dynamo_names.value_of(args[0]), dynamo_internals.trace_of(tx).here)
    return dynamo_names.constant(tx, None) if casts is None else dynamo_internals.variables().Held(casts)


def _answer(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.autocast's questions: answered as in eager (torch_autocast)."""

    def call(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
        policy = dynamo_internals.trace_of(tx).here.policy
        if policy is None or autocast.is_torchs(dynamo_names.called_from(tx)):
            return dynamo_names.in_graph(original).call_function(tx, args, kwargs)
        values = [dynamo_names.value_of(a) for a in args], {name: dynamo_names.value_of(a) for name, a in kwargs.items()}
        return dynamo_names.constant(tx, autocast.answer(original, policy, *values[0], **values[1]))

    return call


def _decorated(decorated: Any) -> Callable[..., Any]:
    """A function of the user's with hmp's decorator: one op on a list."""

    def call(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
        policy = dynamo_internals.trace_of(tx).here.policy
        found = None if policy is None else op_wrap(traced_call.op, user_functions.rule_of(decorated, policy.dtype))
        return traced_call.call_composite(tx, dynamo_names.constant(tx, decorated.__wrapped__, source, "__wrapped__"), found, args, kwargs)

    return call


functions: dict[Any, Callable[..., Any]] = {}
# What enters a region of hmp's where it is called in code that is compiled.
entering: list[Callable[..., Any]] = [regions.disable_casts, regions.enable_casts]
placement.holders.append(dynamo_internals.tables)


def _fill_functions() -> None:
    functions.update(
        {
            state.traced_plainly: lambda tx, args, kwargs, source: dynamo_names.constant(tx, False),
            state.casts_enabled: _casts_enabled,
            without_casts: _quiet,
            state.call_without_casts: _without_casts,
            state.call_under: _call_under,
            module_calls.casts_here: _applied_to,
        }
    )
    functions.update((each, _region(each)) for each in entering)
    functions.update((answer, _answer(original)) for answer, original in autocast.answers().items())


def known_functions() -> dict[Any, Callable[..., Any]]:
    """The functions that stand for more than their code says, those that were decorated meanwhile too."""
    for each in user_functions.decorated():
        functions.setdefault(each, _decorated(each))
    return functions


# --- in place ---------------------------------------------------------------------------------------------------------------


def put_in_place() -> None:
    """Puts the bridge in place, now or when torch._dynamo is imported, until patches.restore()."""
    late_imports.after(_AFTER_IMPORT)


def _reach_dynamo() -> None:
    missing = dynamo_names.unknown()
    if not missing:
        _fill_functions()
        patches.on_restore(functions.clear)
        dynamo_internals.install(sys.modules[__name__])
        return
    warnings.warn(
        f"hmp does not know the torch.compile of torch {torch.__version__} ({missing[0]} is missing or has changed): while hmp is in "
        "place, compiled functions and models run uncompiled, with the casts of eager",
        RuntimeWarning,
        stacklevel=2,
    )
    stance = torch.compiler.set_stance("force_eager")
    patches.on_restore(lambda: stance.__exit__(None, None, None))


def _reach_export() -> None:
    dynamo_internals.install_export(strictly_exporting)


def strictly_exporting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Strict export, which traces as torch.compile does, and then once more by torch's names."""

    def strict_export(*args: Any, **kwargs: Any) -> Any:
        if not functions:  # torch.compile runs everything uncompiled: there is no graph
            raise HmpError(f"hmp cannot put its casts into a strict export of torch {torch.__version__}; export with strict=False")
        return muted(original)(*args, **kwargs)

    return strict_export


_AFTER_IMPORT: dict[str, Callable[[], None]] = {"torch._dynamo": _reach_dynamo, "torch.export._trace": _reach_export}
