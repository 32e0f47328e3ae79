"""What Dynamo does where the program that it traces calls torch, or a function or context of hmp's.

A handler is called in place of tracing a function, with (tx, variables of the arguments, those of the keywords), and returns a variable.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from .. import dispatching_ops, lists, torch_private, user_ops
from ..active import autocast, regions, state
from ..active.regions import Region, without_casts
from ..dispatching_ops import unpatched
from ..ops import table
from ..ops.sites import sites_of
from ..patching.patched_op import PatchedOp
from ..rules.registry import op_wrap
from ..torch_patches import module_calls, modules
from . import traced_call
from .dynamo_names import dynamo
from .traced_state import build, trace_of, under, value_of, without_autocast

Handler = Callable[..., Any]


@functools.cache
def variables() -> types.SimpleNamespace:
    """Return hmp's classes of variables. Made once, for Dynamo is imported late."""

    class Mode(dynamo.TorchFunctionModeVariable):  # type: ignore[misc]
        """The mode through which Dynamo hands each call of torch to hmp."""

        def call_torch_function(self, tx: Any, fn: Any, types: Any, args: Any, kwargs: Any) -> Any:
            is_higher_order = isinstance(fn, dynamo.TorchHigherOrderOperatorVariable)
            return (_call_higher_order if is_higher_order else call)(tx, fn, list(args), dict(kwargs))

    class Function(dynamo.VariableTracker):  # type: ignore[misc]
        """A function that Dynamo does not trace, or a state that traced code passes on."""

        def __init__(self, value: Any, handler: Handler | None = None, **named: Any) -> None:
            super().__init__(**named)
            self.value = value
            self.handler: Any = handler or functions.get(value)

        @classmethod
        def create_with_source(cls, value: Any, source: Any) -> Any:
            return cls(value, source=source)

        def as_python_constant(self) -> Any:
            return self.value

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return self.handler(tx, list(args), dict(kwargs))

    class RegionVariable(dynamo.ContextWrappingVariable):  # type: ignore[misc]
        """A context of hmp's. Entering it changes the state of the trace; nothing of it is in the graph."""

        def __init__(self, value: Region, **named: Any) -> None:
            super().__init__(target_values=[], **named)
            self.value = value

        def enter(self, tx: Any) -> Any:
            self.before = trace_of(tx).current
            inside = self.value._choose(self.before)
            self.off = without_autocast(tx) if self.value.brings_casts else contextlib.nullcontext()
            self.off.__enter__()
            # the policies of its modules must be there when guards are made
            vars(tx.output).setdefault("hmp_regions", []).append(self.value)
            trace_of(tx).enter(inside)
            update_tables()  # the first context of a policy may patch more functions
            return build(tx, None)

        def exit(self, tx: Any, *args: Any) -> Any:
            self.off.__exit__(None, None, None)
            trace_of(tx).enter(self.before)
            return build(tx, None)

        def reconstruct_type(self, codegen: Any) -> None:
            # after a graph break plain Python enters the context, which it gets from this function
            region = self.value
            name = codegen.tx.output.install_global_by_id("hmp_region", lambda: region)
            codegen.append_output(codegen.create_load_global(name, add=True))

    return types.SimpleNamespace(Mode=Mode, Function=Function, Region=RegionVariable)


# --- calls of torch ---------------------------------------------------------------------------------------------------------


_OPERATORS = {each: name.strip("_") for name, each in vars(operator).items() if type(each) is types.BuiltinFunctionType}


def call(tx: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the variable of a call of torch's function `fn` (a variable too), by hmp's rules."""
    function, current = unpatched(getattr(fn, "value", getattr(fn, "fn", None))), trace_of(tx).current
    if tx.export and function in _OPERATORS:  # which export keeps, where Dynamo otherwise hands on the method
        dunder = f"{'' if args[0].is_tensor() else 'r'}{_OPERATORS[function]}"
        function = unpatched(vars(torch.Tensor).get(f"__{dunder}__") or vars(torch.Tensor).get(f"__{_OPERATORS[function]}__", function))
    name, is_python = getattr(function, "__name__", ""), isinstance(function, types.FunctionType)
    found = traced_call.wrapper(current, function)
    if found is None and is_python and name in table.STRUCTURE:  # no op: its ops are decided one by one
        return under(tx, current, traced_call.plain_function(function), args, kwargs)
    if found is None and current.policy is not None and modules.has_autocast_kernel(function):
        found = modules.with_autocast(function, traced_call.op, current.policy.dtype)

    def emit(args: list[Any], kwargs: dict[str, Any]) -> Any:
        if is_python and vars(torch.Tensor).get(name) is function and args and args[0].is_tensor():
            return args[0].call_method(tx, name, args[1:], kwargs)  # one node of the graph, as without a mode
        return fn.call_function(tx, args, kwargs)

    return emit(args, kwargs) if found is None else traced_call.TracedCall(tx, emit).run(found, args, kwargs)


def _call_higher_order(tx: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the variable of a call of one of torch's higher-order ops."""
    current = trace_of(tx).current
    if fn.value is torch_private.flex_attention_op:  # of a flex_attention that was compiled before hmp replaced it
        found = traced_call.wrapper(current, sites_of("flex_attention")[0].original)
        if found is not None:
            return traced_call.call_composite(tx, fn, found, args, kwargs)
    with trace_of(tx).under(current):  # the functions among its arguments are user code, and traced with the mode active
        return fn._call_function(tx, args, kwargs)


def in_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function that Dynamo puts into the graph as a whole (torch.compiler.allow_in_graph) in the state of its caller.

    The graph itself runs without casts.
    """

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        current, function = trace_of(tx).current, self.value
        is_users = isinstance(function, types.FunctionType) and not is_own(function.__globals__)
        if is_users and current.policy is not None and not autocast.is_torchs(function.__module__ or ""):
            self = self.clone(value=functools.wraps(function)(functools.partial(state.call_under, current, function)))
        return original(self, tx, args, kwargs)

    return call_function


def op_variable(value: PatchedOp, source: Any = None) -> Any:
    """Return the variable of a PatchedOp: torch's own function to Dynamo, or one that Dynamo traces like the user's, which is one op."""
    original, in_graph = value.original, dynamo.TorchInGraphFunctionVariable
    if source is not None:
        dynamo.install_guard(source.make_guard(dynamo.GuardBuilder.ID_MATCH))
    if not isinstance(original, types.FunctionType) or dynamo.get_torch_obj_rule_map().get(original) is in_graph:
        return in_graph(value, source=source)

    def call_op(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        found = traced_call.wrapper(trace_of(tx).current, original)
        return traced_call.call_composite(tx, traced_call.plain_function(original), found, args, kwargs)

    return variables().Function(value, call_op, source=source)


COMPILED_HERE: set[types.CodeType] = set()  # the code of what hmp itself has compiled, kernels of a plug-in's
_ON_TOP = tuple(f"hmp.{package}." for package in ("tools", "compat", "cli"))  # their code is compiled as the user's is


def is_own(namespace: Mapping[str, Any]) -> bool:
    """Return True if code with these globals belongs to hmp, or to a module that adds a kind of list."""
    module = str(namespace.get("__name__"))
    return (module.startswith("hmp.") and not module.startswith(_ON_TOP)) or any(module == kind.module for kind in lists.kinds())


# --- calls of hmp's functions -----------------------------------------------------------------------------------------------


def _region(make: Callable[..., Any]) -> Handler:
    """Return the handler of `make`, disable_casts or the like: of a context, or of the result where it decorates a function."""

    def call(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        given, named = [value_of(a) for a in args], {name: value_of(a) for name, a in kwargs.items()}
        if args and callable(given[0]):
            return variables().Region(make(**named)).call_function(tx, args, {})
        return variables().Region(make(*given, **named))

    return call


def _without_casts(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return variables().Function(None, lambda tx, rest, named: _call_without_casts(tx, [*args, *rest], named))


def _call_without_casts(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return under(tx, trace_of(tx).current.off, args[0], args[1:], kwargs)


def _call_innermost(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    inside, outer = value_of(args[0]), trace_of(tx).current
    is_same_policy = inside.scope_id and inside.scope_id == outer.scope_id
    with contextlib.nullcontext() if is_same_policy else without_autocast(tx):
        return under(tx, inside, args[1], args[2:], kwargs)


def _casts_of_module(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    # guarded: the code may run for another module of the class, with another policy
    dynamo.UserFunctionVariable(_key_of).call_function(tx, args, {}).realize()
    casts = module_calls.policy_of_call(value_of(args[0]), trace_of(tx).current)
    return build(tx, None) if casts is None else variables().Function(casts)


def _key_of(module: Any) -> Any:
    found = getattr(module, module_calls.APPLIED)
    return None if found is None else found.key


def _is_new(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if module_calls.is_new(value_of(args[0]), is_traced=True):
        raise dynamo.UnspecializeRestartAnalysis  # policies of modules have changed, on which the trace is guarded
    return build(tx, value=False)


def _answer(original: Callable[..., Any]) -> Handler:
    """Return the handler of `original`, torch.is_autocast_enabled or the like: the user's code gets the answer of eager code."""

    def call(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        policy = trace_of(tx).current.policy
        is_forward = original.__name__ == "is_autocast_enabled" and tx.f_code is torch_private.CUSTOM_FORWARD
        if policy is not None and is_forward and _cell(tx, "cast_inputs") is not None:
            return build(tx, value=True)  # an autocast-disabled block, as in eager code: custom_fwd disables autocast around it
        asked_by = str(tx.f_globals.get("__name__") or "")
        if policy is None or autocast.is_torchs(asked_by) or module_calls.is_of_wrapper(_steps(tx)):
            return dynamo.TorchInGraphFunctionVariable(original).call_function(tx, args, kwargs)
        given, named = [value_of(a) for a in args], {name: value_of(a) for name, a in kwargs.items()}
        return build(tx, autocast.answer(original, policy, *given, **named))

    return call


def _cell(tx: Any, name: str) -> Any:
    """Return the value of a variable that the traced code closes over."""
    return value_of(tx.output.side_effects.load_cell(tx.symbolic_locals[name]))


def _call_op(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of the user's that hmp's decorator has put on a list: it is one op."""
    op, policy, op_source = value_of(args[0]), trace_of(tx).current.policy, args[0].source
    found = None if policy is None else op_wrap(traced_call.op, op.rule(policy.dtype))
    inner = build(tx, op.function, None if op_source is None else dynamo.AttrSource(op_source, "function"))
    return traced_call.call_composite(tx, inner, found, args[1:], kwargs)


functions: dict[Any, Handler] = {}
# The functions that make a context; convert.py adds casts().
entering: list[Callable[..., Any]] = [regions.disable_casts, regions.enable_casts]


def fill_functions() -> None:
    """Fill `functions` with what hmp has in place now."""
    functions.update(
        {
            state.is_traced_unpatched: lambda tx, args, kwargs: build(tx, value=False),
            state.casts_enabled: lambda tx, args, kwargs: build(tx, trace_of(tx).current.policy is not None),
            without_casts: _without_casts,
            state.call_without_casts: _call_without_casts,
            user_ops.call_op: _call_op,
            state.call_under: lambda tx, args, kwargs: under(tx, value_of(args[0]), args[1], args[2:], kwargs),
            autocast.call_innermost: _call_innermost,
            module_calls.policy_of_call_now: _casts_of_module,
            module_calls.is_new: _is_new,
            # guarded with the policy of the call, which was asked for before
            module_calls.outputs_of_call: lambda tx, args, kwargs: build(tx, module_calls.outputs_of_call(value_of(args[0]))),
        }
    )
    functions.update((each, _region(each)) for each in entering)
    functions.update((answer, _answer(original)) for answer, original in autocast.answers.items())


def update_tables() -> None:
    """Have Dynamo know all functions that hmp has replaced or made so far."""
    originals = [op.original for op in dispatching_ops.patched_ops()]
    # those that modes are asked about: not all of these are overridable (torch.nn.functional.hardswish)
    forwarders = filter(None, (getattr(torch.nn.functional, name, None) for name in table.FORWARDERS))
    dynamo.get_overridable_functions().update(originals, forwarders)
    known = dynamo.get_torch_obj_rule_map()
    for each in originals:
        if not isinstance(each, types.FunctionType):
            known.setdefault(each, dynamo.TorchInGraphFunctionVariable)
    known.update(dict.fromkeys(functions, variables().Function))


# --- torch.autocast contexts in traced code -------------------------------------------------------------------------------


def autocast_entered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have the state of the trace follow torch.autocast."""

    def enter(self: Any, tx: Any) -> Any:
        trace, enabled = trace_of(tx), self.target_values[2]  # device type, dtype, enabled, caching
        self.hmp_before = current = trace.current
        chosen = (trace.of_forward or current) if tx.f_code is torch_private.CUSTOM_BACKWARD else autocast.state_inside(current, enabled)
        entered = original(self, tx)
        is_outside = enabled and chosen.policy is not None and module_calls.is_around_applied(None, _steps(tx))
        self.hmp_off = without_autocast(tx) if is_outside else contextlib.nullcontext()
        self.hmp_off.__enter__()
        trace.enter(chosen)
        return entered

    return enter


def autocast_left(original: Callable[..., Any]) -> Callable[..., Any]:
    """Bring back the state that autocast_entered() found."""

    def leave(self: Any, tx: Any, *args: Any) -> Any:
        self.hmp_off.__exit__(None, None, None)
        trace_of(tx).enter(self.hmp_before)
        return original(self, tx, *args)

    return leave


def in_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have autograd.Function.backward traced in the state of user Python in backward, or of torch.amp.custom_bwd."""

    def trace_backward_graph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        trace, forward = trace_of(tx), self.fwd_fn
        is_custom = getattr(forward, "__code__", None) is torch_private.CUSTOM_FORWARD
        restores = is_custom and trace.current.policy is not None and inspect.getclosurevars(forward).nonlocals["cast_inputs"] is None
        outer, trace.of_forward = trace.of_forward, trace.current if restores else None
        try:
            with trace.under(trace.current.in_backward):
                return original(self, tx, *args, **kwargs)
        finally:
            trace.of_forward = outer

    return trace_backward_graph


def _steps(tx: Any) -> Iterable[module_calls.Step]:
    """Return the calls of a trace, innermost first, and those of the program around it."""
    return itertools.chain(_traced_steps(tx), module_calls.frames(sys._getframe(1)))


def _traced_steps(tx: Any) -> Iterator[module_calls.Step]:
    while tx is not None:
        yield module_calls.Step(tx.f_code, functools.partial(_local, tx))
        tx = getattr(tx, "parent", None)


def _local(tx: Any, name: str) -> Any:
    """Return the value of a local variable; None for one that stands for no object."""
    variable = tx.symbolic_locals.get(name)
    try:
        return None if variable is None else value_of(variable)
    except NotImplementedError:
        return None
