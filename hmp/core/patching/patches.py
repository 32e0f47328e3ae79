"""Replaces functions, of torch's as a rule, and puts the old ones back in reverse order.

A function written in Python stays the same object: only its `__code__` is exchanged, so that `from torch import f`, pickles and tables
keyed by function go on working. A builtin is rebound: its name on its owner gets another object.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

from ...errors import HmpError
from ..outermost import read, write

_TARGET = "the function in place"  # a constant in compiled code, which `_calling` replaces by a function

_swapped: dict[types.FunctionType, tuple[types.CodeType, types.CodeType]] = {}
_rebound: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
_undo: list[Callable[[], None]] = []
_unpatched: dict[types.FunctionType, types.FunctionType] = {}
_installation = object()


def installed() -> bool:
    """Whether anything is patched."""
    return bool(_swapped or _rebound or _undo)


def installation() -> object:
    """One object from one `restore()` to the next: for who keeps what was made of `unpatched` functions."""
    return _installation


def unpatched(function: Any) -> Any:
    """What `function` is without hmp's patches: of a Python function a copy with its original code, anything else itself."""
    if not isinstance(function, types.FunctionType):
        return function
    if function not in _unpatched:
        copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__
        _unpatched[function] = functools.update_wrapper(copy, function)  # type: ignore[assignment]
    return _unpatched[function]


def code_of(function: types.FunctionType) -> types.CodeType:
    """The code of `function` without hmp's patches."""
    return _swapped[function][0] if function in _swapped else function.__code__


def swap(function: Any, target: Callable[..., Any]) -> None:
    """Makes `function` call `target` with its arguments, defaults filled in, until `restore()`. A second swap does nothing.

    HmpError where one code is a generator's or a coroutine's and the other is not: Python 3.13 deprecates that.
    """
    if function in _swapped:
        return
    unpatched(function)
    old = function.__code__
    new = _calling(old, target)
    if (old.co_flags ^ new.co_flags) & _KINDS:
        raise HmpError(
            f"{_name(function)}: a {_kind(old)} function cannot be given the code of a {_kind(new)} function; torch is left as it "
            "was. Please report it with the versions of Python and torch"
        )
    _swapped[function] = (old, new)  # first, so that restore() undoes it whenever this is interrupted
    try:
        function.__code__ = new
    except BaseException:
        if function.__code__ is not new:  # an interrupt may come right after it was set
            del _swapped[function]
        raise


def swapped_functions() -> Iterator[tuple[types.FunctionType, types.CodeType]]:
    """The functions that are swapped, each with its original code."""
    for function, (old, _) in _swapped.items():
        yield function, old


def swapped(function: Any) -> bool:
    """Whether `function` is swapped."""
    return function in _swapped


def rebind(owner: Any, name: str, value: Any) -> None:
    """Sets `owner.name` to `value` until `restore()`. A second rebinding of the same name does nothing."""
    place = (id(owner), name)
    if place in _rebound:
        return
    # the owner's own: restore() deletes a name that the owner inherited
    old = read(owner, name)
    _rebound[place] = (owner, name, old, value)
    try:
        write(owner, name, value)
    except BaseException:
        if read(owner, name) is not value:  # an interrupt may come right after it was set
            del _rebound[place]
        raise


def rebound(owner: Any, name: str) -> bool:
    """Whether `owner.name` is rebound."""
    return (id(owner), name) in _rebound


def on_restore(undo: Callable[[], None]) -> None:
    """Has `restore()` call `undo`: for what is neither a swap nor a rebinding. It may be called again, after an interrupt."""
    _undo.append(undo)


def restore() -> None:
    """Undoes everything above, latest first. What other code has patched since stays, with a warning (R16).

    A record is dropped once its patch is undone: after an interrupt the next call goes on with it.
    """
    global _installation
    foreign: list[str] = []
    while _undo:
        _undo[-1]()
        _undo.pop()
    while _rebound:
        owner, name, old, value = next(reversed(_rebound.values()))
        found = read(owner, name)
        if found is value:
            write(owner, name, old)
        elif found is not old:  # else other code has put it back
            foreign.append(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
        _rebound.popitem()
    while _swapped:
        function, (old_code, new_code) = next(reversed(_swapped.items()))
        if function.__code__ is new_code:
            function.__code__ = old_code
        elif function.__code__ is not old_code:
            foreign.append(_name(function))
        _swapped.popitem()
    _unpatched.clear()
    _installation = object()
    for where in foreign:  # last: a warning may be an error
        _warn_foreign(where)


def _name(function: types.FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _warn_foreign(where: str) -> None:
    warnings.warn(
        f"{where} was patched by somebody else on top of hmp; that patch is left standing, and hmp's wrapper below it does "
        "nothing any more. Undo patches in the reverse order of their making",
        RuntimeWarning,
        stacklevel=4,
    )


_KINDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
_Kind = Literal["plain", "generator", "coroutine", "asynchronous generator"]
# How a function of that kind is defined, and its body, in which CALL stands for the call of the target.
_BODIES: dict[_Kind, tuple[str, str]] = {
    "plain": ("def", "return CALL"),
    "generator": ("def", "return (yield from CALL)"),
    "coroutine": ("async def", "return await CALL"),
    "asynchronous generator": (
        "async def",
        """
        hmp_steps = CALL
        hmp_step = hmp_steps.__anext__()
        try:
            while True:
                try:
                    hmp_item = await hmp_step
                except StopAsyncIteration:
                    return
                try:
                    hmp_step = hmp_steps.asend((yield hmp_item))
                except GeneratorExit:
                    raise
                except BaseException as hmp_error:
                    hmp_step = hmp_steps.athrow(hmp_error)
        finally:
            await hmp_steps.aclose()""",
    ),
}


def _kind(code: types.CodeType) -> _Kind:
    if code.co_flags & inspect.CO_ASYNC_GENERATOR:
        return "asynchronous generator"
    if code.co_flags & inspect.CO_COROUTINE:
        return "coroutine"
    return "generator" if code.co_flags & inspect.CO_GENERATOR else "plain"


_Shape = tuple[int, int, int, str, int, _Kind]


@functools.cache
def _template(shape: _Shape) -> types.CodeType:
    """The code of a function of that shape, in which the string _TARGET is called: how many parameters it has by position, how many of
    these by position only, how many by keyword only, its `*args` and `**kwargs`, how many names it closes over, and its kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # "'str' object is not callable": `_calling` replaces the string
        code = compile(_source(*shape), "<hmp>", "exec")
    for _ in ("outer", "function"):
        code = next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return code


def _source(positional: int, only: int, keyword: int, rest: str, free: int, kind: _Kind) -> str:
    """Source of a function whose parameters are p0, p1, k0, args, kwargs, and which closes over f000, f001: few templates serve all.

    The names are closed over in the source: free variables that are only written into a code object have no cells in its frames, and a
    debugger or a traceback that reads the locals of such a frame crashes the interpreter.
    """
    arguments = [f"p{i}" for i in range(positional)]
    call = list(arguments)
    if only:
        arguments.insert(only, "/")
    if "*args" in rest.split():
        arguments.append("*args")
        call.append("*args")
    elif keyword:
        arguments.append("*")
    arguments += [f"k{i}" for i in range(keyword)]
    call += [f"k{i}=k{i}" for i in range(keyword)]
    if "**kwargs" in rest.split():
        arguments.append("**kwargs")
        call.append("**kwargs")
    names = [f"f{i:03}" for i in range(free)]  # a code object has them sorted
    outer = "".join(f"    {variable} = None\n" for variable in names)
    closing = f"        if 0: {', '.join(names)}\n" if names else ""
    define, body = _BODIES[kind]
    body = body.replace("CALL", f"{_TARGET!r}({', '.join(call)})")
    return f"def outer():\n{outer}    {define} function({', '.join(arguments)}):\n{closing}        {body}\n"


def _calling(code: types.CodeType, target: Callable[..., Any]) -> types.CodeType:
    """A code object with the parameters and of the kind of `code`, which calls `target` with its arguments and returns the result."""
    rest = ("*args " if code.co_flags & inspect.CO_VARARGS else "") + ("**kwargs" if code.co_flags & inspect.CO_VARKEYWORDS else "")
    positional, keyword = code.co_argcount, code.co_kwonlyargcount
    template = _template((positional, code.co_posonlyargcount, keyword, rest, len(code.co_freevars), _kind(code)))
    parameters = positional + keyword + len(rest.split())
    keywords = {f"k{i}": name for i, name in enumerate(code.co_varnames[positional : positional + keyword])}

    def constant(value: Any) -> Any:
        if isinstance(value, tuple):  # the keywords of a call
            return tuple(map(constant, value))
        return target if value == _TARGET else keywords.get(value, value)

    named: dict[str, Any] = {}
    if sys.version_info >= (3, 11):
        named["co_qualname"] = code.co_qualname
    return template.replace(
        **named,
        co_consts=tuple(map(constant, template.co_consts)),
        co_flags=template.co_flags | code.co_flags & inspect.CO_ITERABLE_COROUTINE,
        co_varnames=code.co_varnames[:parameters] + template.co_varnames[parameters:],
        co_freevars=code.co_freevars,
        # so that inspect.getsource, and torch.jit.script with it, still find torch's own text
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
    )
