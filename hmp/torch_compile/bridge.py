"""torch.compile and strict torch.export trace hmp's casts into their graphs, and guard compiled code on the policy in force.

While Dynamo traces a frame, each call of an op goes through the wrapper that eager code has for it (traced_call.Call), so that there is no
second set of rules. torch._dynamo takes seconds to import: hmp patches it once somebody else has imported it.

Dynamo's objects in this package: `tx` is the translator of the frame that is being traced, a variable stands for a value of the traced
program, and `source` says where the program got that value. The functions that Dynamo is to call in place of tracing a function take
(tx, variables of the arguments, those of the keywords, source) and return a variable.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import outermost
from ..context import CompiledPolicy, InBackward, Off, Region, regions, state, suspensions, without_casts
from ..dispatch import ActiveFunction, ActiveMethod, ActiveOp, ActiveOperator, deciding, placement, user_functions
from ..errors import HmpError
from ..fp8 import on_gpu
from ..lists import Policy
from ..ops import op_facts
from ..patching import PatchedOp, patches
from ..torch_hooks import around_models, autocast, late_imports, library_ops, module_calls, module_construction
from ..torch_private import reset_dynamo
from ..uncompiled import run_compiled, run_uncompiled
from ..wrapping import op_wrap
from . import dynamo_internals, dynamo_names, traced_call

module = __name__  # Dynamo's guards import it, and call its `key`
region_type = Region
op_types = (ActiveOp, ActiveFunction, ActiveMethod, ActiveOperator)


class Compiling(Off):
    """The state while Dynamo compiles: its own calls of torch are not cast. `program` is the state for the program that it traces."""

    __slots__ = ("program",)

    def __init__(self, program: CompiledPolicy | Off) -> None:
        super().__init__(program.on)
        self.program = program


def state_of_program() -> CompiledPolicy | Off:
    """The state for the program that this thread or task compiles, or runs if it compiles none."""
    here = state.current_state()
    return here.program if isinstance(here, Compiling) else here


def compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, a compiler of Dynamo's, run without casts; what it traces has the casts in force where it is called."""
    return lambda *args, **kwargs: state.call_under(Compiling(state_of_program()), function, *args, **kwargs)


def graph_without_casts(graph: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph, run without casts: its casts were traced into it."""
    return functools.wraps(graph)(without_casts(graph))


def running_under(here: CompiledPolicy | Off, function: types.FunctionType) -> Callable[..., Any] | None:
    """`function`, run in the state `here` wherever it is called; None where nothing is cast, and for what is torch's or hmp's."""
    if here.policy is None or is_own(function.__code__) or autocast.is_torchs(function.__module__ or ""):
        return None
    return functools.wraps(function)(functools.partial(state.call_under, here, function))


# --- what compiled code is guarded on ---------------------------------------------------------------------------------------


# Policy → number. Equal policies have the same number, until more than _MOST_NUMBERS of them were in force.
_numbers: dict[Policy, int] = {}
_number_of: dict[int, tuple[Policy, int]] = {}  # id → policy, which must stay alive, and number: to hash a policy takes a while
_next_number = functools.partial(next, itertools.count(1))
_MOST_NUMBERS = 256


def key() -> tuple[Any, ...]:
    """What compiled code is guarded on, in the calling thread or task: (0 where casts are on, 1 to 3 in the states without; the policy's
    number; its scope id; a count of changes to registered functions; one of changes by apply() and remove())."""
    here = state_of_program()
    mode = 0 if not here.disabled else 3 if isinstance(here, autocast.Paused) else 2 if isinstance(here, InBackward) else 1
    return (mode, _number(here.on.policy), here.scope_id, user_functions.changes(), module_calls.changes())


def _number(policy: Policy | None) -> int:
    """The number of a policy, from 1; 0 for None."""
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


# --- which wrapper is traced ------------------------------------------------------------------------------------------------------


def wrapper(here: CompiledPolicy | Off, key: Any) -> Callable[..., Any] | None:
    """The wrapper that is traced in place of torch's function `key` in the state `here`; None where nothing is cast."""
    if isinstance(here, InBackward):
        return _decided(Policy("no lists"), 0, key) if key in here.replacements.functions else None
    return None if here.policy is None else _decided(here.policy, user_functions.changes(), key)


@functools.lru_cache(8192)
def _decided(policy: Policy, _: int, key: Any) -> Callable[..., Any] | None:
    decision = deciding.decide(policy).get(key)
    return None if decision is None else op_wrap(traced_call.op, decision.rule)


def forget_wrappers() -> None:
    """Discard the wrappers that are traced and all compiled code, after a change of what wrappers are made of."""
    _decided.cache_clear()
    reset_dynamo()


def patched_builtins() -> list[Any]:
    """torch's builtins that hmp has replaced."""
    return [op.original for op in placement.patched_ops()]


def patched_functions() -> list[Any]:
    """torch's functions whose calls hmp decides on."""
    return [*patched_builtins(), *placement.patched_bodies()]


original = placement.own  # dynamo_internals takes what it needs from this module alone


def innermost(value: Any) -> Any:
    """torch's function, for what stands in its place, whoever's that is; any other value itself."""
    return original(outermost.inside(value))


_OWN_FILES = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<hmp")


def is_own(code: types.CodeType) -> bool:
    """Whether `code` belongs to hmp, generated code included."""
    return code.co_filename.startswith(_OWN_FILES)


def is_skipped(code: types.CodeType) -> bool:
    """Whether Dynamo is to leave a frame of `code` as it is: it is hmp's own, and not what hmp has compiled itself."""
    return is_own(code) and code not in on_gpu.compiled_code


def trace(modes: Any, mode: Any) -> traced_call.Trace:
    """The Trace of a frame that Dynamo begins to compile in this thread or task. `mode` joins Dynamo's stack `modes` while casts are on."""
    return traced_call.Trace(modes, mode, state_of_program())


def call(tx: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The variable that a call of torch's function `fn` (a variable too) returns, by hmp's rules."""
    key = dynamo_internals.named_by(tx, fn, args[0] if args else None)
    if isinstance(key, types.FunctionType) and key.__name__ in op_facts.STRUCTURE:
        return traced_call.call_body(tx, key, args, kwargs)
    here = dynamo_internals.trace_of(tx).here
    found = wrapper(here, key)
    if found is None and here.policy is not None and library_ops.has_autocast_kernel(key):
        found = library_ops.with_autocast(key, traced_call.op, here.policy.dtype)
    return traced_call.call(tx, fn, key, found, args, kwargs)


# --- functions that Dynamo must not trace by their code --------------------------------------------------------------------------------


def handler(function: Any) -> Callable[..., Any] | None:
    """What Dynamo is to call for a call of `function`, which hmp has put in place of torch's; None where it may trace its code."""
    if isinstance(function, PatchedOp):
        key = function.original

        def call(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
            found = wrapper(dynamo_internals.trace_of(tx).here, key)
            return traced_call.call_composite(tx, dynamo_names.constant(tx, patches.unpatched(key)), found, args, kwargs)

        return call
    if function.__code__ is _WITHOUT_CASTS:
        inner = inspect.getclosurevars(function).nonlocals["function"]
        return lambda tx, args, kwargs, source: traced_call.under(tx, lambda here: here.off, dynamo_names.constant(tx, inner), args, kwargs)
    return None


_WITHOUT_CASTS = without_casts(lambda: None).__code__


def state_inside(region: Region, here: CompiledPolicy | Off) -> CompiledPolicy | Off:
    """The state inside `region` where it is entered in the state `here`."""
    return region._choose(here)


def returning(region: Region) -> Callable[[], Region]:
    """A function that returns `region`."""
    return lambda: region


def in_autocast(
    here: CompiledPolicy | Off, enabled: bool, opener: types.CodeType, of_forward: CompiledPolicy | Off | None
) -> CompiledPolicy | Off:
    """The state inside a region of torch.autocast that is entered in the state `here`, by this code (R17)."""
    return (of_forward or here) if opener is autocast.BACKWARD else autocast.inside(here, enabled)


def state_for_custom_bwd(forward: Any, here: CompiledPolicy | Off) -> CompiledPolicy | Off | None:
    """The state that torch.amp.custom_bwd brings back where `forward` was called in the state `here`; None where torch restores none."""
    is_custom = getattr(forward, "__code__", None) is autocast.FORWARD and autocast.FORWARD is not None and here.policy is not None
    return here if is_custom and inspect.getclosurevars(forward).nonlocals["cast_inputs"] is None else None


def constructor(value: Any, source: Any) -> tuple[Any, Any]:
    """The `__init__` that stands inside of hmp's, or any other value itself; with where Dynamo found it."""
    return value.function if isinstance(value, module_construction.InitWithoutCasts) else value, source


def is_around_applied(calls: Iterable[tuple[types.CodeType, Callable[[str], Any]]]) -> bool:
    """Whether a region of torch.autocast that the innermost of `calls` enters counts as outside of the policy in force (R17)."""
    return around_models.is_around_applied(None, _steps(calls))


def _steps(calls: Iterable[tuple[types.CodeType, Callable[[str], Any]]]) -> Iterable[around_models.Step]:
    """`calls` of a trace, and those of the program around it."""
    return itertools.chain((around_models.Step(*call) for call in calls), around_models.frames(sys._getframe(1)))


def _region(make: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo calls for `make`, disable_casts or the like: the variable of a region, or of the result where it decorates a function."""

    def call(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
        values = [dynamo_names.value_of(a) for a in args], {name: dynamo_names.value_of(a) for name, a in kwargs.items()}
        if args and callable(values[0][0]):
            return dynamo_internals.variables().Region(make()).call_function(tx, args, {})
        return dynamo_internals.variables().Region(make(*values[0], **values[1]))

    return call


def _casts_enabled(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    return dynamo_names.constant(tx, dynamo_internals.trace_of(tx).here.policy is not None)


def _decorate_without_casts(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    return dynamo_internals.variables().Function(None, lambda tx, rest, named, source: _call_without_casts(tx, [*args, *rest], named))


def _call_without_casts(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    return traced_call.under(tx, lambda here: here.off, args[0], args[1:], kwargs)


def _call_under(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    return traced_call.under(tx, lambda here: dynamo_names.value_of(args[0]), args[1], args[2:], kwargs)


def _call_innermost(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    return traced_call.innermost(tx, dynamo_names.value_of(args[0]), args[1], args[2:], kwargs)


def _casts_of_module(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    module = dynamo_names.value_of(args[0])
    # the code may run for another module of the class, with another mark
    dynamo_names.guard_on(args[0].realize().source, module_calls.MARK, "key" if module_calls.MARK in vars(module) else None)
    casts = module_calls.policy_of_call(module, dynamo_internals.trace_of(tx).here)
    return dynamo_names.constant(tx, None) if casts is None else dynamo_internals.variables().Object(casts)


def _outputs_of_call(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    # guarded with the policy of the call, which was asked for before
    return dynamo_names.constant(tx, module_calls.outputs_of_call(dynamo_names.value_of(args[0])))


def _is_new(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
    if module_calls.is_new(dynamo_names.value_of(args[0]), is_traced=True):
        raise dynamo_names.part("exc").UnspecializeRestartAnalysis  # marks have changed, on which the trace is guarded
    return dynamo_names.constant(tx, False)


def _answer(original: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo calls for `original`, torch.is_autocast_enabled or the like: the user's code gets the answer of eager code (R17)."""

    def call(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
        policy = dynamo_internals.trace_of(tx).here.policy
        asks = policy is not None and original.__name__ == "is_autocast_enabled"
        if asks and dynamo_names.variable_of(tx, autocast.FORWARD, "cast_inputs") is not None:
            return dynamo_names.constant(tx, value=True)  # an island, as in eager code: custom_fwd disables autocast around it
        calls = _steps(dynamo_names.calls_of(tx))
        if policy is None or autocast.is_torchs(dynamo_names.called_from(tx)) or around_models.is_of_wrapper(calls):
            return dynamo_names.in_graph(original).call_function(tx, args, kwargs)
        values = [dynamo_names.value_of(a) for a in args], {name: dynamo_names.value_of(a) for name, a in kwargs.items()}
        return dynamo_names.constant(tx, autocast.answer(original, policy, *values[0], **values[1]))

    return call


def _decorated(decorated: Any) -> Callable[..., Any]:
    """What Dynamo calls for a function of the user's that hmp's decorator has put on a list: it is one op."""

    def call(tx: Any, args: list[Any], kwargs: dict[str, Any], source: Any = None) -> Any:
        policy = dynamo_internals.trace_of(tx).here.policy
        found = None if policy is None else op_wrap(traced_call.op, user_functions.rule_of(decorated, policy.dtype))
        return traced_call.call_composite(tx, dynamo_names.constant(tx, decorated.__wrapped__, source, "__wrapped__"), found, args, kwargs)

    return call


# function → what Dynamo calls in its place
functions: dict[Any, Callable[..., Any]] = {}
# The functions that make a region; session adds casts().
entering: list[Callable[..., Any]] = [regions.disable_casts, regions.enable_casts]


def _fill_functions() -> None:
    functions.update(
        {
            state.is_traced_unpatched: lambda tx, args, kwargs, source: dynamo_names.constant(tx, False),
            state.casts_enabled: _casts_enabled,
            without_casts: _decorate_without_casts,
            state.call_without_casts: _call_without_casts,
            state.call_under: _call_under,
            suspensions.call_innermost: _call_innermost,
            module_calls.policy_of_call_now: _casts_of_module,
            module_calls.is_new: _is_new,
            module_calls.outputs_of_call: _outputs_of_call,
        }
    )
    functions.update((each, _region(each)) for each in entering)
    functions.update((answer, _answer(original)) for answer, original in autocast.answers().items())


def known_functions() -> dict[Any, Callable[..., Any]]:
    """`functions`, with the user's functions that were decorated since."""
    for each in user_functions.decorated():
        functions.setdefault(each, _decorated(each))
    return functions


# --- in place ---------------------------------------------------------------------------------------------------------------


def put_in_place() -> None:
    """Patches torch._dynamo and torch.export, now or once they are imported, until patches.restore()."""
    late_imports.after(_AFTER_IMPORT)


def _reach_dynamo() -> None:
    missing = dynamo_names.unknown()
    if not missing:
        _fill_functions()
        patches.on_restore(functions.clear)
        dynamo_internals.install(sys.modules[__name__])
        innermost = dynamo_names.part("eval_frame").innermost_fn
        patches.swap(innermost, _innermost(patches.unpatched(innermost)))
        return
    warnings.warn(
        f"hmp does not know the torch.compile of torch {torch.__version__} ({missing[0]} is missing or has changed): while hmp is in "
        "place, compiled functions and models run uncompiled, with the casts of eager",
        RuntimeWarning,
        stacklevel=2,
    )
    asks = object()
    run_uncompiled(asks)
    patches.on_restore(lambda: run_compiled(asks))


def _innermost(original: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile compiles for what was compiled before: the model where one is applied, not its `forward`, which has no policy."""

    def innermost_fn(fn: Any, *rest: Any) -> Any:
        model = module_calls.inside_compiled(fn)
        return model if model is not fn and module_calls.is_applied(model) else original(fn, *rest)

    return innermost_fn


def _reach_export() -> None:
    dynamo_internals.install_export(strictly_exporting)


def strictly_exporting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Strict export, without casts but those that Dynamo traces: export calls torch's functions once more on Dynamo's graph."""

    def strict_export(*args: Any, **kwargs: Any) -> Any:
        if not functions:  # torch.compile runs everything uncompiled: there is no graph
            raise HmpError(f"hmp cannot put its casts into a strict export of torch {torch.__version__}; export with strict=False")
        return compiling(original)(*args, **kwargs)

    return strict_export


_AFTER_IMPORT: dict[str, Callable[[], None]] = {"torch._dynamo": _reach_dynamo, "torch.export._trace": _reach_export}
