"""Trace, a frame while Dynamo compiles it, and Call, one call of an op in it, which runs the wrapper that eager code has for the op."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function

from ..torch_private import without_torch_function
from ..wrapping import autocast_inside
from . import dynamo_internals, dynamo_names

Wrapper = Callable[..., Any] | None


class Trace:
    """A frame while Dynamo compiles it. `here` is the state in force at the point that the trace has reached, `of_forward` in the backward
    of an autograd.Function the state that its torch.amp.custom_bwd brings back, else None."""

    def __init__(self, modes: Any, mode: Any, here: Any) -> None:
        self._modes = modes
        self._mode = mode
        self.here = here
        self.of_forward: Any = None
        self._ask(bool(here.replacements.functions))

    def _is_asked(self) -> bool:
        return any(mode is self._mode for mode in self._modes)

    def _ask(self, wanted: bool) -> None:
        """Puts hmp's mode on Dynamo's stack of modes, through which it hands calls to hmp, or takes it off."""
        if wanted and not self._is_asked():
            self._modes.append(self._mode)
        elif not wanted and self._is_asked():
            self._modes.remove(self._mode)

    def enter(self, here: Any) -> Any:
        """Changes the state to `here` from this point of the trace on; returns the state before."""
        before, self.here = self.here, here
        self._ask(bool(here.replacements.functions))
        return before

    @contextlib.contextmanager
    def under(self, here: Any) -> Iterator[None]:
        """Context manager: what is traced inside has the state `here`."""
        before, asked = self.here, self._is_asked()
        self.enter(here)
        try:
            yield
        finally:
            self.here = before
            self._ask(asked)


def innermost(tx: Any, here: Any, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The variable that the variable `function` returns, traced in the state `here`, with the regions of torch.autocast around it off."""
    with contextlib.nullcontext() if dynamo_internals.is_same_policy(tx, here) else dynamo_internals.without_autocast(tx):
        return under(tx, lambda _: here, function, args, kwargs)


def under(tx: Any, choose: Callable[[Any], Any], function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The variable that the variable `function` returns, traced in the state `choose(state so far)`."""
    trace = dynamo_internals.trace_of(tx)
    with trace.under(choose(trace.here)):
        return function.call_function(tx, args, kwargs)


class Aborted(BaseException):
    """Carries an exception of Dynamo's through a wrapper, which would take it for an error of the op."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@contextlib.contextmanager
def _autocast(tx: Any, device: str, dtype: torch.dtype) -> Iterator[None]:
    """Context manager: a region of torch.autocast in the graph, without its cache of weights: a graph run as it is finds stale ones."""
    region = dynamo_internals.variables().Autocast([device, dtype, True, False])
    with without_torch_function():  # to enter calls torch functions, which the Call in force would take for its own
        region.enter(tx)
    try:
        yield
    finally:
        with without_torch_function():
            region.exit(tx)


class Opaque:
    """What a wrapper gets for an argument that is no tensor, constant, number or container: no wrapper reads it."""


def op(*args: Any, **kwargs: Any) -> Any:
    """What wrappers made for compiled code call in place of torch's function: the Call in force adds the op to the graph."""
    return handle_torch_function(op, (), *args, **kwargs)


def inlined(function: types.FunctionType, *args: Any, **kwargs: Any) -> Any:
    """What such wrappers call in place of a Python function of hmp's: the Call in force has the compiler trace it like user code."""
    return handle_torch_function(inlined, (), function, *args, **kwargs)


op.inlined = inlined  # type: ignore[attr-defined]


class Call(TorchFunctionMode):
    """One call of an op in traced code: a torch function mode, under which the op's wrapper runs as it does in eager code.

    The wrapper gets stand-ins for Dynamo's variables: fake tensors for tensors, the value for a constant. What the wrapper calls is traced
    in place of the op, by `emit(variables of arguments, of keywords)` for the op itself.
    """

    def __init__(self, tx: Any, emit: Callable[[list[Any], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.tx = tx
        self._emit = emit
        self._refused = False
        self._variables: dict[int, tuple[Any, Any]] = {}  # id → stand-in, which must stay alive, and its variable

    def run(self, wrapper: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The variable of what the wrapper returns."""
        stand_ins = [self._stand_in(a) for a in args], {name: self._stand_in(a) for name, a in kwargs.items()}
        try:
            with self, autocast_inside.Traced(functools.partial(_autocast, self.tx)):
                result = wrapper(*stand_ins[0], **stand_ins[1])
        except Aborted as aborted:
            raise aborted.error from None
        if self._refused:
            dynamo_names.forget_refusal(self.tx)
        return self._variable(result)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not op and getattr(func, "__name__", "") in _METADATA:
            return func(*args, **kwargs)
        if func is op:
            emit = self._emit
        elif func is inlined:  # what it calls is not decided again (R8)
            function, *args = args
            emit = functools.partial(under, self.tx, lambda here: here.off, dynamo_names.plain_function(function))
        else:
            emit = functools.partial(dynamo_names.constant(self.tx, func).call_function, self.tx)
        variables = [self._variable(a) for a in args], {name: self._variable(a) for name, a in kwargs.items()}
        return self._stand_in(self._traced(emit, *variables))

    def _traced(self, emit: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The variable of a call that is added to the graph; where torch refuses the call its nodes are removed again."""
        graph = dynamo_names.graph_of(self.tx)
        last = next(iter(reversed(graph.nodes)), None)
        try:
            return emit(args, kwargs)
        except dynamo_names.refusals():
            self._refused = True
            for node in reversed(graph.nodes):
                if node is last:
                    break
                graph.erase_node(node)
            raise
        except Exception as error:
            raise Aborted(error) from None

    def _stand_in(self, variable: Any) -> Any:
        """What the wrapper gets for a variable."""
        variable = variable.realize()
        contents = dynamo_names.contents_of(variable)
        if contents is None:
            contents = dynamo_names.items_of(self.tx, variable)
        found: Any
        if variable.is_tensor():
            found = dynamo_names.fake_of(variable)
        elif contents is not None:
            found = dynamo_names.with_each(contents, self._stand_in)
        elif variable.is_python_constant():
            found = variable.as_python_constant()
            if not isinstance(found, (tuple, list, dict, set)):
                return found
        else:
            found = getattr(variable, "sym_num", None)
            found = Opaque() if found is None else found
        self._variables[id(found)] = found, variable
        return found

    def _variable(self, value: Any) -> Any:
        """The variable of a stand-in, or of a value that the wrapper has made."""
        known = self._variables.get(id(value))
        if known is not None:
            return known[1]
        if dynamo_names.is_container(value):
            return dynamo_names.container(self.tx, dynamo_names.with_each(value, self._variable))
        return dynamo_names.constant(self.tx, value)


# What wrappers ask of a tensor's metadata: the fake tensors answer, and nothing is added to the graph.
_METADATA = frozenset("__get__ dim is_floating_point is_complex is_inference numel size".split())


def call(tx: Any, fn: Any, value: Any, wrapper: Wrapper, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The variable that a call of torch's function `value` returns, traced under `wrapper`; `fn` is its variable."""
    name = getattr(value, "__name__", "")
    python_method = isinstance(value, types.FunctionType) and vars(torch.Tensor).get(name) is value

    def emit(args: list[Any], kwargs: dict[str, Any]) -> Any:
        if python_method and args and args[0].is_tensor():
            # one node of the graph, as without a mode
            return args[0].call_method(tx, name, args[1:], kwargs)
        return fn.call_function(tx, args, kwargs)

    return emit(args, kwargs) if wrapper is None else Call(tx, emit).run(wrapper, args, kwargs)


def call_body(tx: Any, function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The variable that a call of torch's Python function returns, which is structure and no op: its ops are decided one by one (R8)."""
    return under(tx, lambda here: here, dynamo_names.plain_function(function), args, kwargs)


def call_composite(tx: Any, function: Any, wrapper: Wrapper, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The variable that a call of a Python function returns, which is one op: what it calls is not decided again (R8). Without a wrapper it
    is traced like user code."""
    if wrapper is None:
        return function.call_function(tx, args, kwargs)
    return Call(tx, functools.partial(under, tx, lambda here: here.off, function)).run(wrapper, args, kwargs)
