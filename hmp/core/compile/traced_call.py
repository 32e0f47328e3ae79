"""One call of an op while Dynamo traces: it runs the wrapper that eager code has for the op, so there is no second set of rules."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function

from .. import tables, user_ops
from ..active import autocast
from ..active.state import InBackward
from ..ops import sites
from ..patching import patches
from ..patching.patched_op import unpatched_op
from ..policy.policy import Policy
from ..rules.registry import op_wrap
from ..torch_private import without_torch_function
from .dynamo_names import dynamo
from .traced_state import State, build, trace_of, under

Wrapper = Callable[..., Any] | None


def op(*args: Any, **kwargs: Any) -> Any:
    """Return what wrappers made for compiled code call in place of torch's function: the active call adds the op to the graph."""
    return handle_torch_function(op, (), *args, **kwargs)


def inlined(function: types.FunctionType, *args: Any, **kwargs: Any) -> Any:
    """Return what such wrappers call in place of a Python function of hmp's: the active call has the compiler trace it like user code."""
    return handle_torch_function(inlined, (), function, *args, **kwargs)


op.inlined = inlined  # type: ignore[attr-defined]


def wrapper(current: State, function: Any) -> Wrapper:
    """Return the wrapper that is traced in place of torch's `function` in the state `current`; None where nothing is cast."""
    if isinstance(current, InBackward):
        return _decided(Policy("no lists"), 0, function) if function in current.replacements.functions else None
    return None if current.policy is None else _decided(current.policy, user_ops.changes(), function)


@functools.partial(sites.cached, most=8192)
def _decided(policy: Policy, _: int, function: Any) -> Wrapper:
    decision = tables.decide(policy).get(function)
    return None if decision is None else op_wrap(op, decision.ruled)


forget_wrappers: Callable[[], None] = _decided.cache_clear  # type: ignore[attr-defined]


def call_composite(tx: Any, function: Any, found: Wrapper, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the variable of a call of a Python function that is one op: what it calls is not decided again.

    Without a wrapper it is traced like user code.
    """
    if found is None:
        return function.call_function(tx, args, kwargs)
    return TracedCall(tx, functools.partial(under, tx, trace_of(tx).current.off, function)).run(found, args, kwargs)


class Aborted(BaseException):
    """Carries an exception of Dynamo's through a wrapper, which would take it for an error of the op."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class TracedCall(TorchFunctionMode):
    """One call of an op in traced code: a torch function mode, under which the op's wrapper runs as it does in eager code.

    The wrapper gets placeholders for Dynamo's variables: fake tensors for tensors, the value for a constant. What the wrapper calls is
    traced in place of the op, by `emit(variables of arguments, of keywords)` for the op itself.
    """

    def __init__(self, tx: Any, emit: Callable[[list[Any], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.tx = tx
        self._emit = emit
        self._refused = False
        self._variables: dict[int, tuple[Any, Any]] = {}  # id → placeholder, which must stay alive, and its variable

    def run(self, wrapper: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the variable of what the wrapper returns."""
        given, named = [self._stand_in(a) for a in args], {name: self._stand_in(a) for name, a in kwargs.items()}
        try:
            with self, autocast.traced_by(self._autocast):
                result = wrapper(*given, **named)
        except Aborted as aborted:
            raise aborted.error from None
        if self._refused and dynamo.handle_observed_exception is not None:
            dynamo.handle_observed_exception(self.tx)  # the call was made in another way: the traced program must not see it
        return self._variable(result)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is op:
            emit = self._emit
        elif getattr(func, "__name__", "") in _METADATA:
            return func(*args, **kwargs)
        elif func is inlined:  # what it calls is not decided again
            function, *args = args
            emit = functools.partial(under, self.tx, trace_of(self.tx).current.off, plain_function(function))
        else:
            emit = functools.partial(build(self.tx, func).call_function, self.tx)
        variables = [self._variable(a) for a in args], {name: self._variable(a) for name, a in kwargs.items()}
        return self._stand_in(self._traced(emit, *variables))

    def _traced(self, emit: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the variable of a call that is added to the graph; where torch refuses the call its nodes are removed again."""
        graph = self.tx.output.current_tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        try:
            return emit(args, kwargs)
        except (dynamo.TorchRuntimeError, *filter(None, [dynamo.FakeTensorObservedException])):
            self._refused = True
            for node in reversed(graph.nodes):
                if node is last:
                    break
                graph.erase_node(node)
            raise
        except Exception as error:
            raise Aborted(error) from None

    @contextlib.contextmanager
    def _autocast(self, device: str, dtype: torch.dtype) -> Iterator[None]:
        """Context manager: a torch.autocast context in the graph, without its cache of weights: a graph run as it is finds stale ones."""
        region = dynamo.AutocastModeVariable([device, dtype, True, False])
        with without_torch_function():  # to enter calls torch functions, which this mode would take for its own
            region.enter(self.tx)
        try:
            yield
        finally:
            with without_torch_function():
                region.exit(self.tx)

    def _stand_in(self, variable: Any) -> Any:
        """Return what the wrapper gets for a variable."""
        variable = variable.realize()
        if variable.is_tensor():
            found = variable.as_proxy().node.meta["example_value"]
        elif (contents := self._contents(variable)) is not None:
            found = _with_each(contents, self._stand_in)
        elif variable.is_python_constant():
            found = variable.as_python_constant()
            if not isinstance(found, (tuple, list, dict, set)):
                return found
        else:
            found = getattr(variable, "sym_num", None)
            found = object() if found is None else found  # wrappers read tensors, constants, numbers and containers
        self._variables[id(found)] = found, variable
        return found

    def _contents(self, variable: Any) -> Any:
        """Return the list, tuple, named tuple (torch.aminmax returns one) or dict of the variables in `variable`; None for others.

        A dict of another class, what a model of transformers returns, breaks the graph: eager code makes one of the same class.
        """
        try:
            kind = variable.python_type()
        except NotImplementedError:
            return None
        if kind in (list, tuple) or _is_named(kind):
            return _maker(kind)(variable.unpack_var_sequence(self.tx))
        if kind is not dict:
            return plain_function(lambda: torch._dynamo.graph_break()).call_function(self.tx, [], {}) if issubclass(kind, dict) else None
        items = build(self.tx, list).call_function(self.tx, [variable.call_method(self.tx, "items", [], {})], {})
        pairs = [pair.unpack_var_sequence(self.tx) for pair in items.unpack_var_sequence(self.tx)]
        if not all(key.is_python_constant() for key, _ in pairs):
            return None
        return {key.as_python_constant(): value for key, value in pairs}

    def _variable(self, value: Any) -> Any:
        """Return the variable of a placeholder, or of a value that the wrapper has made."""
        known, kind = self._variables.get(id(value)), type(value)
        if known is not None:
            return known[1]
        if kind in (list, tuple, dict):
            return build(self.tx, _with_each(value, self._variable))
        if _is_named(kind):
            return build(self.tx, _maker(kind)).call_function(self.tx, [build(self.tx, tuple(map(self._variable, value)))], {})
        return build(self.tx, value)


# What wrappers ask of a tensor's metadata: the fake tensors answer, and nothing is added to the graph.
_METADATA = frozenset("__get__ dim is_floating_point is_complex is_inference numel size".split())


def plain_function(function: Callable[..., Any]) -> Any:
    """Return the variable of an unpatched Python function, which Dynamo traces like one of the user's."""
    return dynamo.UserFunctionVariable(patches.original(unpatched_op(function)))


def _with_each(container: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container of the same class with `function(item)` in place of every item."""
    if isinstance(container, dict):
        return {key: function(item) for key, item in container.items()}
    return _maker(type(container))([function(item) for item in container])


def _is_named(kind: Any) -> bool:
    return hasattr(kind, "_make") or hasattr(kind, "n_fields")


def _maker(kind: Any) -> Any:
    """Return what makes a list or a tuple of class `kind` of one iterable."""
    return getattr(kind, "_make", kind)
