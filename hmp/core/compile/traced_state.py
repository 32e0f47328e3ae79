"""The state at each point of a program that torch.compile traces, and the guard that its compiled code has on the state around it.

`tx` is Dynamo's translator of the frame that is being traced. A variable stands for a value of the traced program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import user_ops
from ..active import autocast, state
from ..active.state import InBackward, Off, PolicyTable
from ..torch_patches import module_calls
from ..torch_private import devices_in_autocast
from .dynamo_names import dynamo

State = PolicyTable | Off


class Compiling(Off):
    """The state while Dynamo compiles: its own calls of torch are not cast. `program` is the state for the program that it traces."""

    __slots__ = ("program",)

    def __init__(self, program: State) -> None:
        super().__init__(program.on)
        self.program = program


def state_of_program() -> State:
    """Return the state for the program that this thread or task compiles, or runs if it compiles none."""
    current = state.current_state()
    return current.program if isinstance(current, Compiling) else current


def compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have `function`, a compiler of Dynamo's, run without casts; what it traces has the casts that are active where it is called."""
    return lambda *args, **kwargs: state.call_under(Compiling(state_of_program()), function, *args, **kwargs)


class _GuardKey:
    """What compiled code is guarded on.

    Dynamo's guards read `value` each time that they look for compiled code, in whatever thread, task or frame: so the state itself is
    compared, however it came or ended.
    """

    @property
    def value(self) -> str:
        """Return the active state, and how often functions were registered and modules got a policy. Equal policies share a table."""
        current = state_of_program()
        table = state.process_table if current.on is state.PROCESS else current.on
        if isinstance(current, InBackward):
            kind = 2 if current.replacements.functions else 4
        else:
            kind = 0 if not current.disabled else 3 if isinstance(current, autocast.Paused) else 1
        number = 0 if table.policy is None else table.number
        return f"{kind} {number} {current.scope_id} {user_ops.changes()} {module_calls.changes()}"


guard_key = _GuardKey()


class _NeverEntered(TorchFunctionMode):
    """The value that the variable of hmp's mode stands for, because Dynamo asks for one. It is never active."""


class Trace:
    """A frame while Dynamo compiles it.

    Dynamo hands each call of torch to the modes on its stack. hmp's is there, while casts are on, only as a variable: a real one would be
    seen by all that runs after a graph break, and would not know of a state that ends by itself, or in another task.

    Attributes:
        current: The active state at the point that the trace has reached.
        of_forward: In the backward of an autograd.Function the state that its torch.amp.custom_bwd brings back, else None.
    """

    def __init__(self, tx: Any, mode: type) -> None:
        # compiled code with another state around it is other code
        source = dynamo.AttrSource(dynamo.AttrSource(tx.import_source(__name__), "guard_key"), "value")
        build(tx, guard_key.value, source).realize()
        self._modes, self._mode = tx.symbolic_torch_function_state.mode_stack, mode(_NeverEntered())
        self.of_forward: State | None = None
        self.enter(state_of_program())

    def enter(self, current: State) -> None:
        """Change the state to `current` from this point of the trace on: hmp's mode is on Dynamo's stack where that replaces functions."""
        self.current = current
        wanted, asked = bool(current.replacements.functions), any(mode is self._mode for mode in self._modes)
        if wanted and not asked:
            self._modes.append(self._mode)
        elif asked and not wanted:
            self._modes.remove(self._mode)

    @contextlib.contextmanager
    def under(self, current: State) -> Iterator[None]:
        """Context manager: what is traced inside has the state `current`."""
        before = self.current
        self.enter(current)
        try:
            yield
        finally:
            self.enter(before)


def trace_of(tx: Any) -> Trace:
    """Return the Trace of the frame that `tx` translates."""
    found: Trace = tx.symbolic_torch_function_state.hmp
    return found


def under(tx: Any, current: State, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the variable of what the variable `function` returns, traced in the state `current`."""
    with trace_of(tx).under(current):
        return function.call_function(tx, args, kwargs)


def without_autocast(tx: Any) -> contextlib.ExitStack:
    """Have what is traced until the end of this context run without the torch.autocast contexts that are enabled here.

    While Dynamo traces, torch's own state is that of the traced program. A trace that Dynamo gives up never ends the context.
    """
    cached = torch.is_autocast_cache_enabled()
    regions = contextlib.ExitStack()
    for device in devices_in_autocast():
        region = dynamo.AutocastModeVariable([device, torch.get_autocast_dtype(device), False, cached])
        region.enter(tx)
        regions.callback(region.exit, tx)
        tx.output.hmp_backward_is_outside = True
    return regions


def build(tx: Any, value: Any, source: Any = None) -> Any:
    """Return the variable of a Python value, or of a list, tuple or dict of variables. `source` is where the program got it, for guards."""
    return dynamo.VariableTracker.build(tx, value, source)


def value_of(variable: Any) -> Any:
    """Return the Python object that a variable stands for: a constant, a function, a module or an object of the user's."""
    variable = variable.realize()
    return variable.value if hasattr(variable, "value") else variable.as_python_constant()
