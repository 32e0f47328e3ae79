"""R17: what is done around a model from outside, though its code runs inside a call that hmp has put a policy around.

accelerate gives a model another `forward`, which opens a context and calls the model's own; Fabric and DeepSpeed put the model into a
wrapper whose `forward` does; a pre-hook can, too. Such a context counts as outside: the policy becomes active in the model's own forward.
A wrapper that asks for torch.autocast's state does so in order to open such a context, and not to build an autocast-disabled block: it gets
torch's answer.
"""

from __future__ import annotations

import gc
import itertools
import re
import types
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..policy import unwrapped
from . import module_calls

_MOST_LOOKED_AT = 128
TORCHS = torch.nn.modules.module.__file__  # where a call of every module passes
_PASSED = (TORCHS, module_calls.CALL.co_filename)  # and may pass
# What torch.compile calls the code that goes on after a graph break in a function of that name.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")


class Step(NamedTuple):
    """One call on the way to a context, of the interpreter's stack or of a trace of torch.compile's."""

    code: types.CodeType
    local: Callable[[str], Any]  # the value of a local variable


def frames(frame: types.FrameType | None, names: Container[str] | None = None) -> Iterator[Step]:
    """Yield the calls from `frame` outwards; with `names` those of functions of such a name, for the others cost time."""
    while frame is not None:
        if names is None or frame.f_code.co_name in names:
            yield Step(frame.f_code, lambda name, frame=frame: frame.f_locals.get(name))  # type: ignore[misc]
        frame = frame.f_back


# What a call of a module passes: a frame of such a name has the module as its `self`.
CALLS = frozenset(("forward", "__call__", "_call_impl"))


def running(steps: Iterable[Step]) -> Iterator[torch.nn.Module]:
    """Yield the modules that are being called at the innermost of `steps`, innermost first, and more than once each."""
    for step in steps:
        if step.code.co_name in CALLS and isinstance(module := step.local("self"), torch.nn.Module):
            yield module


def is_inside_another(module: torch.nn.Module, frame: types.FrameType) -> bool:
    """Return True if a call of another module than `module` is running at `frame`."""
    return any(each is not module for each in running(frames(frame, CALLS)))


def is_of_wrapper(steps: Iterable[Step]) -> bool:
    """Return True if the innermost call of a module is that of a wrapper around a model, such as DeepSpeed's engine, not of the model."""
    return any(unwrapped(module) is not module for module in itertools.islice(running(steps), 1))


def is_around_applied(region: Any, steps: Iterable[Step]) -> bool:
    """Return True if `region`, which the innermost of `steps` enters, begins in a call of an applied model and before its own forward.

    `region` is torch's object; None in a trace, where it is not known: one that the model's forward is decorated with is then taken for it.
    """
    passed: list[types.CodeType] = []
    for step in steps:
        if _runs(step.code, module_calls.CALL) and module_calls.applied(module := step.local("self")):
            return not _is_own(region, unwrapped(module), passed)
        passed.append(step.code)
    return False


def _runs(code: types.CodeType, own: types.CodeType) -> bool:
    """Return True if `code` is `own`, or what torch.compile has made of it: of the whole, or of what comes after a graph break."""
    if code is own or code.co_filename != own.co_filename:
        return code is own
    resumed = _RESUMED.fullmatch(code.co_name)
    if resumed is None:
        return code.co_firstlineno == own.co_firstlineno
    lines = [line for _, _, line in own.co_lines() if line is not None]
    return resumed[1] == own.co_name and own.co_firstlineno <= code.co_firstlineno <= max(lines, default=0)


_DECORATED: types.CodeType = next(
    constant for constant in torch.amp.autocast_mode.autocast_decorator.__code__.co_consts if isinstance(constant, types.CodeType)
)


def _is_own(region: Any, module: torch.nn.Module, passed: list[types.CodeType]) -> bool:
    """Return True if the module's own code opened the context.

    A method of its class is among `passed`, the code between the call and the context, or is decorated with the context.
    """
    functions = [*_methods(type(module), passed), *([] if (replaced := _rewritten_forward(module)) is None else [replaced])]
    for function in functions:
        for each in _with_wrapped(function):
            code = getattr(getattr(each, "__func__", each), "__code__", None)
            if code is None:
                continue
            if code is _DECORATED:
                if (region is None and code in passed) or any(cell.cell_contents is region for cell in each.__closure__ or ()):
                    return True
            elif code.co_filename not in _PASSED and any(_runs(one, code) for one in passed):
                return True
    return False


def _methods(cls: type, passed: list[types.CodeType]) -> list[Any]:
    """Return the class's `forward`, and those of its methods that have the name of code in `passed` or are decorated with a context."""
    names = {"forward"}
    names.update(resumed[1] if (resumed := _RESUMED.fullmatch(code.co_name)) else code.co_name for code in passed)
    own = [each for base in cls.__mro__ if base not in (torch.nn.Module, object) for each in vars(base).items()]
    return [value for name, value in own if name in names or getattr(value, "__code__", None) is _DECORATED]


def _rewritten_forward(module: torch.nn.Module) -> Any:
    """Return the function that replaces the module's `forward` and does not call it: the module's own code, by somebody who rewrote it."""
    replaced = vars(module).get("forward")
    return None if replaced is None or _leads_to(replaced, type(module).forward, module) else replaced


def _with_wrapped(function: Any) -> Iterator[Any]:
    """Yield `function`, and what it says it wraps."""
    for _ in range(_MOST_LOOKED_AT):
        if function is None:
            return
        yield function
        function = getattr(function, "__wrapped__", None)


def _leads_to(replaced: Any, own: Any, module: torch.nn.Module) -> bool:
    """Return True if the function that replaces a module's forward calls that, as far as its closure and attributes show."""
    targets = {id(function) for function in _with_wrapped(own)}
    kept = [value for name, value in vars(module).items() if name != "forward"]  # the old one, under another name
    code = getattr(getattr(replaced, "__func__", replaced), "__code__", None)
    kept += [] if code is None else [replaced.__globals__.get(name) for name in code.co_names]
    if any(value is own or getattr(value, "__func__", None) is own for value in kept):
        return True
    looked_at: list[Any] = [replaced]
    for each in looked_at:
        if id(each) in targets:
            return True
        if len(looked_at) <= _MOST_LOOKED_AT and not isinstance(each, (type, types.ModuleType, torch.nn.Module)):
            left_out = getattr(each, "__globals__", None), getattr(each, "__builtins__", None)
            held = [inner for inner in gc.get_referents(each) if not any(inner is one for one in left_out)]
            looked_at += [inner for inner in held if callable(inner) or type(inner) in (types.CellType, tuple, dict)]
    return False
