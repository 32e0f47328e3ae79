"""The patches of torch.compile. What is cast is decided in `bridge`, which install() is given as a module.

Dynamo traces a program symbolically, and for every function, method and operator of torch it asks the torch function modes in force. hmp
is such a mode, which exists only while Dynamo traces: nothing of it is left in the compiled code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..patching import PatchedOp, patches
from ..torch_private import devices_in_autocast
from .dynamo_names import calls_of, constant, part, torch_variable

# --- Dynamo's variables -----------------------------------------------------------------------------------------------------


@functools.cache
def variables() -> types.SimpleNamespace:
    """hmp's subclasses of Dynamo's classes of variables, and Dynamo's own for torch.autocast. Made once, for Dynamo is imported late."""
    function, opaque = _function_and_object()
    autocast = part("variables.ctx_manager").AutocastModeVariable
    return types.SimpleNamespace(Mode=_mode(), Function=function, Object=opaque, Region=_region(), Autocast=autocast)


def _mode() -> type:
    higher_order = part("variables.higher_order_ops").TorchHigherOrderOperatorVariable

    class TorchFunctionModeVariable(part("variables.torch_function").TorchFunctionModeVariable):  # type: ignore[misc]
        """The mode through which Dynamo hands each call of torch to the bridge."""

        def call_torch_function(self, tx: Any, fn: Any, types: Any, args: Any, kwargs: Any) -> Any:
            modes = tx.symbolic_torch_function_state
            if isinstance(fn, higher_order):
                # the functions among its arguments are user code, and traced with this mode in force
                modes.push_torch_function_mode(self)
                try:
                    return fn._call_function(tx, list(args), dict(kwargs))
                finally:
                    modes.pop_torch_function_mode()
            return _bridge.call(tx, fn, list(args), dict(kwargs))

    return TorchFunctionModeVariable


def _function_and_object() -> tuple[type, type]:
    VariableTracker = part("variables.base").VariableTracker

    class Function(VariableTracker):  # type: ignore[misc, valid-type]
        """A function that Dynamo does not trace: for a call, `handler` is called with (tx, arguments, keywords, source)."""

        def __init__(self, value: Any, handler: Any = None, **named: Any) -> None:
            super().__init__(**named)
            self.value = value
            self.handler = handler or _bridge.functions[value]

        @classmethod
        def create_with_source(cls, value: Any, source: Any) -> Any:
            return cls(value, source=source)

        def as_python_constant(self) -> Any:
            return self.value

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return self.handler(tx, list(args), dict(kwargs), self.source)

    class Object(VariableTracker):  # type: ignore[misc, valid-type]
        """An object of hmp's that traced code passes on and reads nothing of."""

        def __init__(self, value: Any, **named: Any) -> None:
            super().__init__(**named)
            self.value = value

    return Function, Object


def _region() -> type:
    Constant = part("variables.constant").ConstantVariable

    class Region(part("variables.ctx_manager").ContextWrappingVariable):  # type: ignore[misc]
        """A region of hmp's. Entering it changes the state of the trace; nothing of it is in the graph."""

        def __init__(self, value: Any, **named: Any) -> None:
            super().__init__(target_values=[], **named)
            self.value = value

        def enter(self, tx: Any) -> Any:
            trace = trace_of(tx)
            self.before = trace.here
            inside = _bridge.state_inside(self.value, trace.here)
            self.off = without_autocast(tx) if self.value.brings_casts else contextlib.nullcontext()
            self.off.__enter__()
            vars(tx.output).setdefault("hmp_regions", []).append(self.value)  # a region's marks must be there when guards are made
            trace.enter(inside)
            _update_tables()  # the first region of a policy may patch more functions
            return Constant.create(None)

        def exit(self, tx: Any, *args: Any) -> Any:
            self.off.__exit__(None, None, None)
            trace_of(tx).enter(self.before)
            return Constant.create(None)

        def reconstruct_type(self, codegen: Any) -> None:
            # after a graph break plain Python enters the region, which it gets from this function
            name = codegen.tx.output.install_global_by_id("hmp_region", _bridge.returning(self.value))
            codegen.append_output(codegen.create_load_global(name, add=True))

    return Region


class _Mark(TorchFunctionMode):
    """The value that the mode's variable stands for, because Dynamo asks for one. It is never in force."""


def trace_of(tx: Any) -> Any:
    """The traced_call.Trace of the frame that `tx` translates."""
    return tx.symbolic_torch_function_state.hmp


def without_autocast(tx: Any) -> contextlib.ExitStack:
    """What is traced until the end of this context runs without the regions of torch.autocast that are enabled at this point of the trace.

    While Dynamo traces, torch's own state is that of the traced program. A trace that Dynamo gives up never ends the context."""
    autocast, cached = variables().Autocast, torch.is_autocast_cache_enabled()
    regions = contextlib.ExitStack()
    for device in devices_in_autocast():
        region = autocast([device, torch.get_autocast_dtype(device), False, cached])
        region.enter(tx)
        regions.callback(region.exit, tx)
        tx.output.hmp_backward_is_outside = True
    return regions


def is_same_policy(tx: Any, here: Any) -> bool:
    """Whether `here` belongs, by its scope id, to the policy in force at this point of the trace."""
    return bool(here.scope_id and here.scope_id == trace_of(tx).here.scope_id)


def named_by(tx: Any, fn: Any, first: Any) -> Any:
    """torch's function behind the variable `fn`. Export keeps operators such as `operator.add`: for those, the method of torch.Tensor."""
    value = _bridge.innermost(getattr(fn, "value", getattr(fn, "fn", None)))
    if not tx.export:
        return value
    builtin = part("variables.builtin")
    reflected = None if first is None or first.is_tensor() else builtin.BUILTIN_TO_TENSOR_RFN_MAP.get(value)
    return reflected or builtin.BUILTIN_TO_TENSOR_FN_MAP.get(value, value)


_bridge: Any = None
_added: list[Any] = []  # the keys that hmp has added to Dynamo's table of functions


def install(bridge: Any) -> None:
    """Patches Dynamo, until patches.restore(). `bridge` is that module."""
    global _bridge
    _bridge = bridge
    state = part("variables.torch_function").SymbolicTorchFunctionState
    base = part("variables.torch").BaseTorchVariable
    autocast = part("variables.ctx_manager").AutocastModeVariable
    for function, make in (
        (part("convert_frame").CatchErrorsWrapper.__call__, _skipping_own_code),
        (part("convert_frame").trace_frame, bridge.compiling),
        (part("output_graph").OutputGraph.call_user_compiler, _graph_without_casts),
        (part("symbolic_convert").InstructionTranslatorBase._load_const, _with_functions),
        (state.__init__, _with_trace),
        (base.__init__, lambda original: lambda self, value, **named: original(self, bridge.original(value), **named)),
        (base.create_with_source.__func__, _with_original),
        (autocast.enter, _autocast_entered),
        (autocast.exit, _autocast_left),
        (part("variables.higher_order_ops").AutogradFunctionApplyVariable.trace_backward_graph, _in_backward),
        (part("variables.misc").SuperVariable._resolved_getattr_and_source, _constructing),
        (part("variables.user_defined").UserDefinedClassVariable._call_cross_entropy_loss, _calling_cross_entropy),
        (part("variables.torch").TorchInGraphFunctionVariable.call_function, _with_casts_inside),
    ):
        patches.swap(function, make(patches.unpatched(function)))
    patches.on_restore(_forget)


def install_export(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts `make(strict export)` in place of strict export, until patches.restore()."""
    export = importlib.import_module("torch.export._trace")
    for name in ("_strict_export", "_strict_export_lower_to_aten_ir"):  # torch 2.7 calls the second one itself
        function = getattr(export, name, None)
        if function is not None:
            patches.swap(function, make(patches.unpatched(function)))


def _skipping_own_code(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has Dynamo skip hmp's own frames, which run as plain Python after a graph break."""

    def __call__(self: Any, frame: Any, *args: Any) -> Any:
        return part("convert_frame").ConvertFrameReturn() if _bridge.is_skipped(frame.f_code) else original(self, frame, *args)

    return __call__


def _graph_without_casts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has compiled graphs run without casts: they hold their own, and call torch's functions by names that hmp has patched."""

    def call_user_compiler(self: Any, gm: Any, example_inputs: Any) -> Any:
        with _backward_outside() if getattr(self, "hmp_backward_is_outside", False) else contextlib.nullcontext():
            compiled = original(self, gm, example_inputs)
        lazy = importlib.import_module("torch.fx._lazy_graph_module")._LazyGraphModule
        module = compiled if isinstance(compiled, lazy) else getattr(compiled, "__self__", None)
        if isinstance(module, lazy):  # as Dynamo does itself, but not for a graph inside a wrapper
            lazy.force_recompile(module)
            compiled = module.forward
        return _bridge.graph_without_casts(compiled)

    return call_user_compiler


def _backward_outside() -> AbstractContextManager[Any]:
    """Inside it AOTAutograd traces backward as eager code runs it, outside of torch.autocast; else it would be as in the region around the
    graph, which is off for the ops of a policy."""
    config: Any = importlib.import_module("torch._functorch.config")
    if not hasattr(config, "backward_pass_autocast"):
        return contextlib.nullcontext()
    return config.patch(backward_pass_autocast="off")  # type: ignore[no-any-return]


def _with_functions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has Dynamo take functions among the constants of code: hmp puts them into the code that stands in place of torch's."""

    def _load_const(self: Any, inst: Any) -> Any:
        value = inst.argval
        if not isinstance(value, (types.FunctionType, PatchedOp)):
            return original(self, inst)
        handler = _bridge.handler(value)
        if handler is None:
            return part("variables.functions").UserFunctionVariable(value)
        return variables().Function(value, handler)

    return _load_const


def _with_trace(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has each frame begin with a Trace of its own, and with a guard on `bridge.key()`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _update_tables()
        tx = part("symbolic_convert").InstructionTranslator.current_tx()
        source = part("source")
        key = source.CallFunctionNoArgsSource(source.AttrSource(tx.import_source(_bridge.module), "key"))
        guards = part("guards")
        guards.install_guard(key.make_guard(guards.GuardBuilder.EQUALS_MATCH))
        self.hmp = _bridge.trace(self.mode_stack, variables().Mode(_Mark()))

    return __init__


def _with_original(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has Dynamo take torch's function for what replaces it, without a guard: the policy is guarded on (`bridge.key`)."""

    def create_with_source(cls: Any, value: Any, source: Any) -> Any:
        function = _bridge.original(value)
        return original(cls, value, source) if function is value else cls(function, source=source)

    return create_with_source


def _autocast_entered(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any, tx: Any) -> Any:
        enabled = self.target_values[2]  # device type, dtype, enabled, caching
        self.hmp_before = trace_of(tx).here
        chosen = _bridge.in_autocast(self.hmp_before, enabled, tx.f_code, trace_of(tx).of_forward)
        entered = original(self, tx)
        is_outside = enabled and chosen.policy is not None and _bridge.is_around_applied(calls_of(tx))
        self.hmp_off = without_autocast(tx) if is_outside else contextlib.nullcontext()
        self.hmp_off.__enter__()
        trace_of(tx).enter(chosen)
        return entered

    return enter


def _autocast_left(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, tx: Any, *args: Any) -> Any:
        self.hmp_off.__exit__(None, None, None)
        trace_of(tx).enter(self.hmp_before)
        return original(self, tx, *args)

    return leave


def _in_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has autograd.Function.backward traced in the state of user Python in backward (R13), or of torch.amp.custom_bwd."""

    def trace_backward_graph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        trace = trace_of(tx)
        around, trace.of_forward = trace.of_forward, _bridge.state_for_custom_bwd(self.fwd_fn, trace.here)
        try:
            with trace.under(trace.here.in_backward):
                return original(self, tx, *args, **kwargs)
        finally:
            trace.of_forward = around

    return trace_backward_graph


def _constructing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has `super().__init__` be the function that a class of modules has, not what hmp has put around it."""
    return lambda self, tx, name: _bridge.constructor(*original(self, tx, name))


def _calling_cross_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has a CrossEntropyLoss that traced code makes call F.cross_entropy, for which Dynamo adds a node to the graph past all modes."""

    def _call_cross_entropy_loss(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        made = original(self, tx, args, kwargs)  # which refuses wrong arguments
        named = {**dict(zip(_OF_CROSS_ENTROPY, args, strict=False)), **kwargs}
        function = constant(tx, torch.nn.functional.cross_entropy)
        made.fn = lambda *tensors, **by_name: function.call_function(tx, list(tensors), {**by_name, **named})
        return made

    return _call_cross_entropy_loss


def _with_casts_inside(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function of the user's that Dynamo puts into the graph as a whole (torch.compiler.allow_in_graph) run in the state of the place
    where it is called: the graph itself runs without casts."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(self.value, types.FunctionType):
            inside = _bridge.running_under(trace_of(tx).here, self.value)
            self = self if inside is None else self.clone(value=inside)
        return original(self, tx, args, kwargs)

    return call_function


_OF_CROSS_ENTROPY = tuple(inspect.signature(torch.nn.CrossEntropyLoss).parameters)


def _update_tables() -> None:
    """Has Dynamo's tables, which it fills from torch's names, hold torch's functions and not what stands there; adds hmp's functions."""
    torch_variables, rules = part("variables.torch"), part("trace_rules")
    part("variables.builtin").populate_builtin_to_tensor_fn_map()
    known = rules.get_torch_obj_rule_map()
    types_known = part("variables.builder").VariableBuilder._type_dispatch()
    if _bridge.region_type not in types_known:  # the first trace
        builtin = part("variables.builtin")
        for table in (
            builtin.BUILTIN_TO_TENSOR_FN_MAP,
            builtin.BUILTIN_TO_TENSOR_RFN_MAP,
            torch_variables.constant_fold_functions,
            torch_variables.TorchInGraphFunctionVariable._get_handlers(),
            known,
            part("variables.tensor").all_tensor_attrs,
        ):
            for key in [k for k, v in table.items() if _bridge.innermost(k) is not k or _bridge.innermost(v) is not v]:
                value = table.pop(key)
                table.setdefault(_bridge.innermost(key), _bridge.innermost(value))
        types_known[_bridge.region_type] = lambda self, value: variables().Region(value, source=self.source)
        sourceless = part("variables.builder").SourcelessBuilder._type_handlers
        for kind in _bridge.op_types:
            types_known[kind] = lambda self, value: torch_variable().create_with_source(value, self.source)
            sourceless[kind] = lambda tx, value: torch_variable()(value)
    overridable = torch_variables.get_overridable_functions()
    patched = [function for function in overridable if _bridge.innermost(function) is not function]
    overridable.difference_update(patched)
    overridable.update(_bridge.patched_functions(), map(_bridge.innermost, patched))
    in_graph = dict.fromkeys(_bridge.patched_builtins(), torch_variables.TorchInGraphFunctionVariable)
    for each, kind in (*in_graph.items(), *dict.fromkeys(_bridge.known_functions(), variables().Function).items()):
        if each not in known:
            known[each] = kind
            _added.append(each)


def _forget() -> None:
    """Takes hmp's entries out of Dynamo's tables; that of functions is discarded as a whole where the patches are (reset_dynamo)."""
    global _bridge
    _added.clear()
    builder = part("variables.builder")
    for kind in (_bridge.region_type, *_bridge.op_types):
        builder.VariableBuilder._type_dispatch().pop(kind, None)
        builder.SourcelessBuilder._type_handlers.pop(kind, None)
    _bridge = None
