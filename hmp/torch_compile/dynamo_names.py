"""Everything private that hmp uses of torch.compile, by name, and functions that use it. unknown() checks the names before any is used."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pkgutil
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..patching import patches

# Names below torch._dynamo, with the first parameters that they must have.
_EXPECTED = """
convert_frame.CatchErrorsWrapper.__call__ self frame
convert_frame.ConvertFrameReturn
convert_frame.trace_frame code globals locals
eval_frame.innermost_fn fn
exc.TorchRuntimeError
guards.GuardBuilder.EQUALS_MATCH
guards.GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT
guards.install_guard
output_graph.OutputGraph.call_user_compiler self gm example_inputs
output_graph.OutputGraph.install_global_by_id self prefix value
side_effects.SideEffects.load_cell self cellvar
source.AttrSource
source.CallFunctionNoArgsSource
symbolic_convert.InstructionTranslator.current_tx
symbolic_convert.InstructionTranslatorBase._load_const self inst
symbolic_convert.InstructionTranslatorBase.import_source self module_name
trace_rules.get_tensor_method
trace_rules.get_torch_obj_rule_map
variables.base.VariableTracker.build
variables.base.VariableTracker.realize self
variables.builder.SourcelessBuilder._type_handlers
variables.builder.VariableBuilder._type_dispatch
variables.builtin.BUILTIN_TO_TENSOR_FN_MAP
variables.builtin.BUILTIN_TO_TENSOR_RFN_MAP
variables.builtin.populate_builtin_to_tensor_fn_map
variables.constant.ConstantVariable.create
variables.ctx_manager.AutocastModeVariable.enter self tx
variables.ctx_manager.AutocastModeVariable.exit self tx
variables.ctx_manager.ContextWrappingVariable.reconstruct_type self codegen
variables.dicts.ConstDictVariable.keys_as_python_constant self
variables.functions.UserFunctionVariable
variables.higher_order_ops.AutogradFunctionApplyVariable.__init__ self fwd_fn bwd_fn
variables.higher_order_ops.AutogradFunctionApplyVariable.trace_backward_graph self tx
variables.higher_order_ops.TorchHigherOrderOperatorVariable._call_function self tx args kwargs
variables.lists.ListVariable
variables.lists.TupleVariable
variables.misc.SuperVariable._resolved_getattr_and_source self tx name
variables.tensor.all_tensor_attrs
variables.torch.BaseTorchVariable.__init__ self value
variables.torch.BaseTorchVariable.create_with_source value source
variables.torch.TorchInGraphFunctionVariable._get_handlers
variables.torch.TorchInGraphFunctionVariable.call_function self tx args kwargs
variables.torch.constant_fold_functions
variables.torch.get_overridable_functions
variables.torch_function.SymbolicTorchFunctionState.__init__ self py_stack
variables.user_defined.UserDefinedClassVariable._call_cross_entropy_loss self tx args kwargs
variables.torch_function.SymbolicTorchFunctionState.pop_torch_function_mode self
variables.torch_function.SymbolicTorchFunctionState.push_torch_function_mode self
variables.torch_function.TorchFunctionModeVariable.call_torch_function self tx fn types args kwargs
"""


def unknown() -> list[str]:
    """The names in `_EXPECTED` that this torch lacks, or has with other parameters. torch._dynamo must have been imported."""
    found = []
    for line in _EXPECTED.strip().splitlines():
        name, *parameters = line.split()
        try:
            value = pkgutil.resolve_name(f"torch._dynamo.{name}")
            if parameters and list(inspect.signature(value).parameters)[: len(parameters)] != parameters:
                raise AttributeError(name)
        except (AttributeError, ImportError):
            found.append(f"torch._dynamo.{name}")
    return found


@functools.cache
def part(module: str) -> Any:
    """A module of torch._dynamo."""
    return importlib.import_module(f"torch._dynamo.{module}")


def constant(tx: Any, value: Any, source: Any = None, attribute: str = "") -> Any:
    """The variable of a Python value; with a guard where it is the attribute of an object that Dynamo found at `source`."""
    found_at = None if source is None else part("source").AttrSource(source, attribute)
    return part("variables.base").VariableTracker.build(tx, value, found_at)


def guard_on(source: Any, name: str, attribute: str | None) -> None:
    """Guards on the equality of `attribute` of what an object has as `name` in its `__dict__`; without one, on its having nothing there.

    `source` is where Dynamo found the object; None for one that the traced code has made.
    """
    if source is None:
        return
    guards, attr_source = part("guards"), part("source").AttrSource
    if attribute is None:
        guard = source.make_guard(functools.partial(guards.GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name))
    else:
        guard = attr_source(attr_source(source, name), attribute).make_guard(guards.GuardBuilder.EQUALS_MATCH)
    guards.install_guard(guard)


def plain_function(value: types.FunctionType) -> Any:
    """The variable of torch's unpatched Python function, which Dynamo traces like a function of the user's."""
    return part("variables.functions").UserFunctionVariable(patches.unpatched(value))


@functools.cache
def refusals() -> tuple[type[BaseException], ...]:
    """The exceptions that Dynamo raises where torch's fake tensors refuse a call."""
    exc = part("exc")
    # torch 2.15 and later: the traced program may catch this one
    observed = getattr(exc, "FakeTensorObservedException", None)
    return (exc.TorchRuntimeError,) if observed is None else (exc.TorchRuntimeError, observed)


def forget_refusal(tx: Any) -> None:
    """Clears the exception of a refused call, which was then made in another way: the traced program must not see it."""
    if len(refusals()) > 1:
        part("exc").handle_observed_exception(tx)


def graph_of(tx: Any) -> Any:
    """The graph that `tx` adds nodes to."""
    return tx.output.current_tracer.graph


def fake_of(variable: Any) -> torch.Tensor:
    """The fake tensor of a tensor's variable."""
    found: torch.Tensor = variable.as_proxy().node.meta["example_value"]
    return found


def contents_of(variable: Any) -> Any:
    """The list, tuple, named tuple (such as torch.aminmax returns) or dict of the variables in `variable`; None for anything else."""
    lists = part("variables.lists")
    kind = type(variable)
    if kind is lists.ListVariable:
        return list(variable.items)
    if kind is part("variables.dicts").ConstDictVariable:
        if variable.python_type() is not dict or not all(key.vt.is_python_constant() for key in variable.items):
            return None
        return variable.keys_as_python_constant()  # which guards on the keys
    tuple_class = tuple if kind is lists.TupleVariable else getattr(variable, "tuple_cls", None)
    return _maker(tuple_class)(variable.items) if tuple_class is tuple or _is_named(tuple_class) else None


class OfOtherClass(dict[Any, Any]):
    """The items of a dict of another class, an OrderedDict or what a model of transformers returns. `variable` is that of the dict."""

    variable: Any


def items_of(tx: Any, variable: Any) -> OfOtherClass | None:
    """The variables in a dict of another class than dict; None for anything else. Dynamo has a class of variables for each such class, so
    that the traced program is to make a dict of it."""
    try:
        kind = variable.python_type()
    except NotImplementedError:
        return None
    items = contents_of(constant(tx, dict).call_function(tx, [variable], {})) if kind is not dict and issubclass(kind, dict) else None
    if items is None:
        return None
    found = OfOtherClass(items)
    found.variable = variable
    return found


def _with_items(holder: Any, items: Any) -> Any:
    copied = copy.copy(holder)
    for key, item in items.items():
        copied[key] = item
    return copied


def is_container(value: Any) -> bool:
    """Whether `value` is a list, a tuple, a named tuple or a dict: what contents_of() gives, or items_of()."""
    return type(value) in (list, tuple, dict, OfOtherClass) or _is_named(type(value))


def with_each(container: Any, function: Callable[[Any], Any]) -> Any:
    """A container of the same class with `function(item)` in place of every item."""
    if isinstance(container, dict):
        found = copy.copy(container)
        found.update((key, function(item)) for key, item in container.items())
        return found
    return _maker(type(container))([function(item) for item in container])


def container(tx: Any, contents: Any) -> Any:
    """The variable of a list, tuple, named tuple or dict of variables: the inverse of contents_of() and items_of()."""
    lists = part("variables.lists")
    if isinstance(contents, list):
        return lists.ListVariable(contents)
    if isinstance(contents, dict):
        items = [lists.TupleVariable([constant(tx, key), item]) for key, item in contents.items()]
        made = constant(tx, dict).call_function(tx, [lists.ListVariable(items)], {})
        if isinstance(contents, OfOtherClass):  # as eager code makes one of the same class
            return part("variables.functions").UserFunctionVariable(_with_items).call_function(tx, [contents.variable, made], {})
        return made
    plain = lists.TupleVariable(list(contents))
    return plain if type(contents) is tuple else constant(tx, _maker(type(contents))).call_function(tx, [plain], {})


def _is_named(kind: Any) -> bool:
    return hasattr(kind, "_make") or hasattr(kind, "n_fields")


def _maker(kind: Any) -> Any:
    """What makes a list or a tuple of class `kind` of one iterable."""
    return getattr(kind, "_make", kind)


def in_graph(function: Any) -> Any:
    """The variable of torch's function, a call of which is one node of the graph."""
    return torch_variable()(function)


def torch_variable() -> Any:
    """Dynamo's class of variables for torch's functions."""
    return part("variables.torch").TorchInGraphFunctionVariable


def value_of(variable: Any) -> Any:
    """The Python object that a variable stands for: a constant, a function, a module or an object of the user's."""
    variable = variable.realize()
    return variable.value if hasattr(variable, "value") else variable.as_python_constant()


def variable_of(tx: Any, code: types.CodeType | None, name: str) -> Any:
    """The value of the constant that `code`, if it is what is being traced, has around it as `name`; else None."""
    if tx.f_code is not code:
        return None
    cell = tx.symbolic_locals[name]
    return value_of(tx.output.side_effects.load_cell(cell))


def called_from(tx: Any) -> str:
    """The name of the module whose code is being traced."""
    return str(tx.f_globals.get("__name__") or "")


def calls_of(tx: Any) -> Iterator[tuple[types.CodeType, Callable[[str], Any]]]:
    """The calls at this point of the trace, innermost first: the code of each, and what gives the value of a local variable, None for one
    that stands for no object."""
    while tx is not None:
        yield tx.f_code, functools.partial(_value_of_local, tx)
        tx = getattr(tx, "parent", None)


def _value_of_local(tx: Any, name: str) -> Any:
    variable = tx.symbolic_locals.get(name)
    try:
        return None if variable is None else value_of(variable)
    except NotImplementedError:
        return None
