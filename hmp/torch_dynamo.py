"""The private parts of torch.compile that hmp touches, and nothing of hmp's own: checked before anything is touched.

Dynamo traces a program symbolically, and asks the torch function modes that are in force for every function, method and operator of
torch that it meets. Casts enter there, as a mode that exists only while Dynamo traces: nothing is left of it in the compiled code.

What the bridge (compile_bridge) gives: `opened(trace)` for a frame whose compilation begins, `called(call)` for a call of an op,
`function(function)` for one that stands for more than its code says, and `muted` and `traced_under` around what runs by torch's names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function

from . import patches

# module → names, with the parameters that they must have
_EXPECTED: dict[str, dict[str, tuple[str, ...] | None]] = {
    "convert_frame": {
        "CatchErrorsWrapper.__call__": ("self", "frame"),
        "ConvertFrameReturn": None,
        "trace_frame": ("code", "globals", "locals"),
    },
    "output_graph": {"OutputGraph.call_user_compiler": ("self", "gm", "example_inputs")},
    "symbolic_convert": {
        "InstructionTranslatorBase._load_const": ("self", "inst"),
        "InstructionTranslatorBase.import_source": ("self", "module_name"),
        "InstructionTranslator.current_tx": (),
    },
    "source": {"AttrSource": None, "CallFunctionNoArgsSource": None},
    "guards": {"GuardBuilder.EQUALS_MATCH": None, "install_guard": None},
    "exc": {"TorchRuntimeError": None, "Unsupported": None, "unimplemented": None},
    "trace_rules": {"get_torch_obj_rule_map": (), "get_tensor_method": ()},
    "variables.base": {"VariableTracker.build": None, "VariableTracker.realize": None},
    "variables.builder": {"VariableBuilder._type_dispatch": None},
    "variables.builtin": {"populate_builtin_to_tensor_fn_map": (), "BUILTIN_TO_TENSOR_FN_MAP": None, "BUILTIN_TO_TENSOR_RFN_MAP": None},
    "variables.ctx_manager": {
        "AutocastModeVariable.enter": ("self", "tx"),
        "AutocastModeVariable.exit": ("self", "tx"),
        "ContextWrappingVariable": None,
        "GradModeVariable.create": ("tx", "target_value"),
    },
    "variables.functions": {"UserFunctionVariable": None},
    "variables.higher_order_ops": {
        "AutogradFunctionApplyVariable.trace_backward_graph": ("self", "tx"),
        "TorchHigherOrderOperatorVariable._call_function": ("self", "tx", "args", "kwargs"),
    },
    "variables.lists": {"ListVariable": None, "TupleVariable": None},
    "variables.dicts": {"ConstDictVariable": None},
    "variables.torch": {
        "BaseTorchVariable.__init__": ("self", "value"),
        "BaseTorchVariable.create_with_source": ("value", "source"),
        "TorchInGraphFunctionVariable._get_handlers": (),
        "TorchInGraphFunctionVariable.call_function": ("self", "tx", "args", "kwargs"),
        "get_overridable_functions": (),
        "constant_fold_functions": None,
    },
    "variables.torch_function": {
        "SymbolicTorchFunctionState.__init__": ("self", "py_stack"),
        "TorchFunctionModeVariable.call_torch_function": ("self", "tx", "fn", "types", "args", "kwargs"),
    },
}  # fmt: skip


def unknown() -> list[str]:
    """The names that this torch does not have, or has with other parameters. torch._dynamo must have been imported."""
    found = []
    for module, names in _EXPECTED.items():
        for name, parameters in names.items():
            try:
                value = functools.reduce(getattr, name.split("."), importlib.import_module(f"torch._dynamo.{module}"))
                if parameters is not None and tuple(inspect.signature(value).parameters)[: len(parameters)] != parameters:
                    raise AttributeError(name)
            except (AttributeError, ImportError):
                found.append(f"torch._dynamo.{module}.{name}")
    return found


class Trace:
    """One frame while it is compiled, and what is in force where the trace has arrived; `here.table` is empty for no casts."""

    def __init__(self, modes: Any, mode: Any, here: Any) -> None:
        self._modes = modes
        self._mode = mode
        self.here = here
        self._ask(bool(here.table))

    def _is_asked(self) -> bool:
        return any(mode is self._mode for mode in self._modes)

    def _ask(self, wanted: bool) -> None:
        """Whether Dynamo asks hmp about the calls that follow."""
        if wanted and not self._is_asked():
            self._modes.append(self._mode)
        elif not wanted and self._is_asked():
            self._modes.remove(self._mode)

    def enter(self, here: Any) -> Any:
        """From here on `here` is in force. Gives back what was."""
        before, self.here = self.here, here
        self._ask(bool(here.table))
        return before

    @contextlib.contextmanager
    def under(self, here: Any) -> Iterator[None]:
        """A stretch of the trace with `here` in force."""
        before, asked = self.here, self._is_asked()
        self.enter(here)
        try:
            yield
        finally:
            self.here = before
            self._ask(asked)


def trace_of(tx: Any) -> Trace:
    """The trace that Dynamo's translator `tx` is at work on."""
    found: Trace = tx.symbolic_torch_function_state.hmp
    return found


class Aborted(BaseException):
    """Carries an exception of Dynamo's own through a wrapper, which must not take it for an op's."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Opaque:
    """Stands for an argument that no wrapper looks into."""


def op(*args: Any, **kwargs: Any) -> Any:
    """The op of the call that is being decided: what a wrapper made for compiled code calls in the place of torch's function."""
    return handle_torch_function(op, (), *args, **kwargs)


class Call(TorchFunctionMode):
    """One call of an op that Dynamo has met. Its wrapper runs on stand-ins, Dynamo's fake tensors, and whatever it calls is traced
    in place of the call: casts are decided by the very code that decides them in eager."""

    def __init__(self, tx: Any, emit: Callable[[list[Any], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.tx = tx
        self._emit = emit
        self._variables: dict[int, tuple[Any, Any]] = {}  # id → the stand-in, kept alive, and what it stands for

    def run(self, wrapper: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the wrapper returns, as Dynamo has it."""
        stand_ins = [self._stand_in(a) for a in args], {name: self._stand_in(a) for name, a in kwargs.items()}
        try:
            with self:
                result = wrapper(*stand_ins[0], **stand_ins[1])
        except Aborted as aborted:
            raise aborted.error from None
        return self._variable(result)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not op and getattr(func, "__name__", "") in _LOOKS:
            return func(*args, **kwargs)
        given = [self._variable(a) for a in args], {name: self._variable(a) for name, a in kwargs.items()}
        if func is op:
            return self._stand_in(self._traced(self._emit, *given))
        function = _dynamo("variables.base").VariableTracker.build(self.tx, func)
        return self._stand_in(self._traced(functools.partial(function.call_function, self.tx), *given))

    def _traced(self, emit: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The result of a call that goes into the graph. Nothing of one that torch refuses stays there."""
        graph = self.tx.output.current_tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        try:
            return emit(args, kwargs)
        except _dynamo("exc").TorchRuntimeError:
            for node in reversed(graph.nodes):
                if node is last:
                    break
                graph.erase_node(node)
            raise
        except Exception as error:
            raise Aborted(error) from None

    def _stand_in(self, variable: Any) -> Any:
        variable = variable.realize()
        lists = _dynamo("variables.lists")
        if variable.is_tensor():
            found = variable.as_proxy().node.meta["example_value"]
        elif type(variable) is lists.ListVariable:
            found = [self._stand_in(item) for item in variable.items]
        elif type(variable) is lists.TupleVariable:
            found = tuple(self._stand_in(item) for item in variable.items)
        elif variable.is_python_constant():
            found = variable.as_python_constant()
            if not isinstance(found, (torch.Size, tuple, list, dict, set)):
                return found
        else:
            found = getattr(variable, "sym_num", None)
            found = Opaque() if found is None else found
        self._variables[id(found)] = found, variable
        return found

    def _variable(self, value: Any) -> Any:
        known = self._variables.get(id(value))
        if known is not None:
            return known[1]
        lists, build = _dynamo("variables.lists"), _dynamo("variables.base").VariableTracker.build
        if type(value) is list:
            return lists.ListVariable([self._variable(item) for item in value])
        if type(value) is tuple:
            return lists.TupleVariable([self._variable(item) for item in value])
        return build(self.tx, value)


# What wrappers look at without computing: answered by the fake tensors.
_LOOKS = frozenset("__get__ dim is_floating_point is_complex is_inference numel size".split())


@functools.cache
def _dynamo(module: str) -> Any:
    return importlib.import_module(f"torch._dynamo.{module}")


# --- Dynamo's variables -----------------------------------------------------------------------------------------------------


@functools.cache
def _variables() -> types.SimpleNamespace:
    """Kinds of Dynamo's variables that are hmp's."""
    VariableTracker = _dynamo("variables.base").VariableTracker
    Constant = _dynamo("variables.constant").ConstantVariable
    higher_order = _dynamo("variables.higher_order_ops").TorchHigherOrderOperatorVariable

    class TorchFunctionModeVariable(_dynamo("variables.torch_function").TorchFunctionModeVariable):  # type: ignore[misc]
        """The mode that hmp is while a frame is traced."""

        def call_torch_function(self, tx: Any, fn: Any, types: Any, args: Any, kwargs: Any) -> Any:
            modes = tx.symbolic_torch_function_state
            if isinstance(fn, higher_order):
                # the functions that it is given are user code: traced with the mode in force
                modes.push_torch_function_mode(self)
                try:
                    return fn._call_function(tx, list(args), dict(kwargs))
                finally:
                    modes.pop_torch_function_mode()
            return _called(tx, fn, list(args), dict(kwargs))

    class Function(VariableTracker):  # type: ignore[misc]
        """A function that the bridge has its own way with: called with the translator and Dynamo's arguments."""

        def __init__(self, value: Any, handler: Any = None, **named: Any) -> None:
            super().__init__(**named)
            self.value = value
            self.handler = handler or _bridge.functions[value]

        @classmethod
        def create_with_source(cls, value: Any, source: Any) -> Any:
            return cls(value, source=source)

        def as_python_constant(self) -> Any:
            return self.value

        def python_type(self) -> type:
            return types.FunctionType

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return self.handler(tx, list(args), dict(kwargs), self.source)

    class Held(VariableTracker):  # type: ignore[misc]
        """An object of hmp's that is handed around and not looked into."""

        def __init__(self, value: Any, **named: Any) -> None:
            super().__init__(**named)
            self.value = value

        def as_python_constant(self) -> Any:
            return self.value

    class Region(_dynamo("variables.ctx_manager").ContextWrappingVariable):  # type: ignore[misc]
        """A region of hmp's: moves what is in force for the trace, and leaves nothing in the graph."""

        def __init__(self, value: Any, **named: Any) -> None:
            super().__init__(target_values=[], **named)
            self.value = value

        def enter(self, tx: Any) -> Any:
            trace = trace_of(tx)
            self.before = trace.enter(_bridge.chosen(self.value, trace.here))
            _settle_tables()  # a policy's first region puts more of torch under hmp
            return Constant.create(None)

        def exit(self, tx: Any, *args: Any) -> Any:
            trace_of(tx).enter(self.before)
            return Constant.create(None)

        def reconstruct_type(self, codegen: Any) -> None:
            # where Python runs between two graphs, it enters the region that this function gives
            name = codegen.tx.output.install_global_by_id("hmp_region", _bridge.giving(self.value))
            codegen.append_output(codegen.create_load_global(name, add=True))

    return types.SimpleNamespace(Mode=TorchFunctionModeVariable, Function=Function, Held=Held, Region=Region)


class _Mark(TorchFunctionMode):
    """Never in force: Dynamo's variable for a mode has one to stand for."""


def _called(tx: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A call of torch's that Dynamo has asked its modes about."""
    value = _bridge.original(getattr(fn, "value", getattr(fn, "fn", None)))
    if tx.export:  # Dynamo names the method behind an operator everywhere else
        reflected = not args[0].is_tensor() and _dynamo("variables.builtin").BUILTIN_TO_TENSOR_RFN_MAP.get(value)
        key = reflected or _dynamo("variables.builtin").BUILTIN_TO_TENSOR_FN_MAP.get(value, value)
    else:
        key = value
    if isinstance(value, types.FunctionType):
        if args and args[0].is_tensor() and vars(torch.Tensor).get(value.__name__) is value:
            # a method written in Python: in the graph it is one call, as without a mode
            emit = lambda args, kwargs: args[0].call_method(tx, value.__name__, args[1:], kwargs)  # noqa: E731
        elif _bridge.is_user_code(value):
            return trace_body(tx, value, args, kwargs)
        else:
            emit = lambda args, kwargs: fn.call_function(tx, args, kwargs)  # noqa: E731
    else:
        emit = lambda args, kwargs: fn.call_function(tx, args, kwargs)  # noqa: E731
    wrapper = _bridge.wrapper(trace_of(tx).here, key)
    return emit(args, kwargs) if wrapper is None else Call(tx, emit).run(wrapper, args, kwargs)


def trace_body(tx: Any, function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What torch's Python function returns, its own code traced like a user's."""
    trace = trace_of(tx)
    with trace.under(trace.here):
        return _dynamo("variables.functions").UserFunctionVariable(patches.plain(function)).call_function(tx, args, kwargs)


def trace_wrapped(tx: Any, wrapper: Callable[..., Any] | None, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A call of a Python function that is one op: what it calls is not decided again (R8). No wrapper: it is user code like any."""
    trace = trace_of(tx)

    def emit(args: list[Any], kwargs: dict[str, Any]) -> Any:
        with trace.under(trace.here.off):
            return function.call_function(tx, args, kwargs)

    return function.call_function(tx, args, kwargs) if wrapper is None else Call(tx, emit).run(wrapper, args, kwargs)


def constant(tx: Any, value: Any) -> Any:
    """A Python value as Dynamo has it."""
    return _dynamo("variables.base").VariableTracker.build(tx, value)


def wrapped_by(tx: Any, function: Any, source: Any) -> Any:
    """What the function that Dynamo found at `source` wraps, guarded on."""
    inner = None if source is None else _dynamo("source").AttrSource(source, "__wrapped__")
    return _dynamo("variables.base").VariableTracker.build(tx, function, inner)


def in_graph(function: Any) -> Any:
    """torch's function as Dynamo has it."""
    return _dynamo("variables.torch").TorchInGraphFunctionVariable(function)


def function(handler: Callable[..., Any]) -> Any:
    """A function as Dynamo has it, whose calls are the handler's: it takes the translator and Dynamo's arguments."""
    return _variables().Function(handler, handler)


def held(value: Any) -> Any:
    """An object of hmp's as Dynamo has it."""
    return _variables().Held(value)


def region(value: Any) -> Any:
    """A region of hmp's as Dynamo has it."""
    return _variables().Region(value)


def value_of(variable: Any) -> Any:
    """The Python object behind a variable of Dynamo's: a constant, a function, a module or an object of the user's."""
    variable = variable.realize()
    return variable.value if hasattr(variable, "value") else variable.as_python_constant()


def called_from(tx: Any) -> str:
    """The name of the module whose code is being traced."""
    return str(tx.f_globals.get("__name__") or "")


# --- in place ---------------------------------------------------------------------------------------------------------------


_bridge: Any = None
_added: list[Any] = []  # what Dynamo's table of functions has of hmp's


def install(bridge: Any) -> None:
    """Puts everything of this module in place, until patches.restore()."""
    global _bridge
    _bridge = bridge
    state = _dynamo("variables.torch_function").SymbolicTorchFunctionState
    base = _dynamo("variables.torch").BaseTorchVariable
    autocast = _dynamo("variables.ctx_manager").AutocastModeVariable
    for function, make in (
        (_dynamo("convert_frame").CatchErrorsWrapper.__call__, _skipping_own_code),
        (_dynamo("convert_frame").trace_frame, _muted_trace),
        (_dynamo("output_graph").OutputGraph.call_user_compiler, _muted_result),
        (_dynamo("symbolic_convert").InstructionTranslatorBase._load_const, _with_functions),
        (state.__init__, _with_trace),
        (base.__init__, _of_original),
        (base.create_with_source.__func__, _with_original),
        (autocast.enter, _autocast_entered),
        (autocast.exit, _autocast_left),
        (_dynamo("variables.higher_order_ops").AutogradFunctionApplyVariable.trace_backward_graph, _in_backward),
    ):
        patches.swap(function, make(patches.plain(function)))
    patches.on_restore(_forget)


def install_export(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts what `make` makes of strict export in its place, until patches.restore()."""
    export = importlib.import_module("torch.export._trace")
    if hasattr(export, "_strict_export"):
        patches.swap(export._strict_export, make(patches.plain(export._strict_export)))


def _skipping_own_code(original: Callable[..., Any]) -> Callable[..., Any]:
    """hmp's own code, run as Python between two graphs, is no program of the user's to compile."""

    def __call__(self: Any, frame: Any, *args: Any) -> Any:
        return _dynamo("convert_frame").ConvertFrameReturn() if _bridge.is_own(frame.f_code) else original(self, frame, *args)

    return __call__


def _muted_trace(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: _bridge.muted(original)(*args, **kwargs)


def _muted_result(original: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph holds its casts: what it calls by torch's names is to cast nothing more."""

    def call_user_compiler(self: Any, gm: Any, example_inputs: Any) -> Any:
        compiled = original(self, gm, example_inputs)
        lazy = importlib.import_module("torch.fx._lazy_graph_module")._LazyGraphModule
        module = compiled if isinstance(compiled, lazy) else getattr(compiled, "__self__", None)
        if isinstance(module, lazy):  # as Dynamo does for a graph that nothing is wrapped around
            lazy.force_recompile(module)
            compiled = module.forward
        return _bridge.muted_graph(compiled)

    return call_user_compiler


def _with_functions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Code that stands in the place of torch's has a function among its constants, which no compiler puts there."""

    def _load_const(self: Any, inst: Any) -> Any:
        value = inst.argval
        if not isinstance(value, types.FunctionType):
            return original(self, inst)
        handler = _bridge.handler(value)
        if handler is None:
            return _dynamo("variables.functions").UserFunctionVariable(value)
        return _variables().Function(value, handler)

    return _load_const


def _with_trace(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _settle_tables()
        tx = _dynamo("symbolic_convert").InstructionTranslator.current_tx()
        source = _dynamo("source")
        key = source.CallFunctionNoArgsSource(source.AttrSource(tx.import_source(_bridge.module), "key"))
        guards = _dynamo("guards")
        guards.install_guard(key.make_guard(guards.GuardBuilder.EQUALS_MATCH))
        self.hmp = Trace(self.mode_stack, _variables().Mode(_Mark()), _bridge.traced())

    return __init__


def _of_original(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, value, **named: original(self, _bridge.original(value), **named)


def _with_original(original: Callable[..., Any]) -> Callable[..., Any]:
    """No guard on what stands in the place of torch's function: its code is exchanged when other casts come into force."""

    def create_with_source(cls: Any, value: Any, source: Any) -> Any:
        function = _bridge.original(value)
        return original(cls, value, source) if function is value else cls(function, source=source)

    return create_with_source


def _autocast_entered(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any, tx: Any) -> Any:
        result = original(self, tx)
        trace = trace_of(tx)
        _, _, enabled, *_ = self.target_values
        self.hmp_before = trace.enter(_bridge.in_autocast(trace.here, enabled))
        return result

    return enter


def _autocast_left(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, tx: Any, *args: Any) -> Any:
        trace_of(tx).enter(self.hmp_before)
        return original(self, tx, *args)

    return leave


def _in_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """autograd.Function.backward is user Python that runs in backward (R13)."""

    def trace_backward_graph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        trace = trace_of(tx)
        with trace.under(trace.here.in_backward):
            return original(self, tx, *args, **kwargs)

    return trace_backward_graph


def _settle_tables() -> None:
    """Dynamo's tables, filled at import or at first use from torch's names, hold torch's functions, and know hmp's."""
    torch_variables, rules = _dynamo("variables.torch"), _dynamo("trace_rules")
    _dynamo("variables.builtin").populate_builtin_to_tensor_fn_map()
    known = rules.get_torch_obj_rule_map()
    types_known = _dynamo("variables.builder").VariableBuilder._type_dispatch()
    if _bridge.region_type not in types_known:  # the first trace
        for table in _tables():
            for key in [k for k, v in table.items() if _bridge.original(k) is not k or _bridge.original(v) is not v]:
                value = table.pop(key)
                table.setdefault(_bridge.original(key), _bridge.original(value))
        types_known[_bridge.region_type] = lambda self, value: _variables().Region(value, source=self.source)
    torch_variables.get_overridable_functions().update(_bridge.decided())
    in_graph = dict.fromkeys(_bridge.all_switches(), torch_variables.TorchInGraphFunctionVariable)
    in_graph.update({_bridge.original(switch): kind for switch, kind in in_graph.items()})
    for each, kind in (*in_graph.items(), *dict.fromkeys(_bridge.known_functions(), _variables().Function).items()):
        if each not in known:
            known[each] = kind
            _added.append(each)


def _tables() -> Iterator[dict[Any, Any]]:
    builtin, torch_variables = _dynamo("variables.builtin"), _dynamo("variables.torch")
    yield from (builtin.BUILTIN_TO_TENSOR_FN_MAP, builtin.BUILTIN_TO_TENSOR_RFN_MAP)
    yield from (torch_variables.constant_fold_functions, torch_variables.TorchInGraphFunctionVariable._get_handlers())
    yield from (_dynamo("trace_rules").get_torch_obj_rule_map(), _dynamo("variables.tensor").all_tensor_attrs)


def _forget() -> None:
    global _bridge
    known = _dynamo("trace_rules").get_torch_obj_rule_map()
    while _added:
        known.pop(_added.pop(), None)
    _dynamo("variables.builder").VariableBuilder._type_dispatch().pop(_bridge.region_type, None)
    _bridge = None
