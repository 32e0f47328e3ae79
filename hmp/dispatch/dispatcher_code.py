"""Python source for dispatchers: one for each builtin's parameters and each fast path.

A call for which the fast path's condition is true goes to the op. Otherwise the dispatcher casts plain tensors by itself, and calls the
wrapper for anything else.
Over a bare forwarder generated code adds 80 to 200 ns to a call where one function for any arguments adds 190 to 260.
docs/pages/explain/architecture.md shows what is written for `linear`; in a traceback, a debugger and
`inspect.getsource(F.linear.__code__)` its lines are found too.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import types
from collections.abc import Callable
from typing import Any

import torch

from ..caches import cast_cache
from ..casting import FINITE_MAX, tensor_casts
from ..context import state
from ..ops import ALIASES, Parameter, Signature
from .fast_path import PLAIN, FastPath, condition_of


class _NotGiven:
    """Stands for an argument that a call did not give. Its dtype is none that a tensor has."""

    dtype = None

    def __repr__(self) -> str:
        return "..."


NOT_GIVEN = _NotGiven()


def replacement_in_region(now: Any, key: Any, op: Callable[..., Any]) -> Callable[..., Any]:
    """What to call for torch's function `key`, whose own code is `op`, where the context says that `now` is in force."""
    found: Callable[..., Any] = (now or state.here()).table.get(key, op)
    return found


def given(signature: Signature, values: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments and keywords of a call, made again of the values of all parameters: what was not given is left out."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    defaults = 0  # at the end of args: left out, for numpy's name of the parameter may be given
    for parameter, value in zip(signature.parameters, values, strict=True):
        is_default = value is NOT_GIVEN or _is_default(value, parameter)
        if is_default and (value is NOT_GIVEN or parameter.holds == "absent"):
            continue
        if not parameter.by_keyword and not kwargs and signature.parameters[len(args)] is parameter:
            args.append(value)
            defaults = defaults + 1 if is_default else 0
        elif not is_default:
            kwargs[parameter.name] = value
    return args[: len(args) - defaults], kwargs


def _is_default(value: Any, parameter: Parameter) -> bool:
    return isinstance(value, (int, float, str, type(None))) and repr(value) == parameter.default


_SIGNATURES: list[Signature] = []  # those that dispatchers were made for; generated code refers to them by number
NAMES: dict[str, Any] = {
    "regions_open": state.regions_open, "get": state.get, "PROCESS": state.PROCESS, "OFF": state.PROCESS.off,
    "replacement_in_region": replacement_in_region,
    "given": given, "NOT_GIVEN": NOT_GIVEN, "Tensor": torch.Tensor, "Parameter": torch.nn.Parameter, "float32": torch.float32,
    "bfloat16": torch.bfloat16, "float16": torch.float16, "bool_": torch.bool, "int64": torch.int64, "__name__": __name__,
    "SIGNATURES": _SIGNATURES,
    "FOCUS": state.PROCESS, "LIMIT": FINITE_MAX[torch.float16], "CAST": tensor_casts.cast,
    "CAST_PRODUCT_INPUT": cast_cache.cast_product_input,
}  # fmt: skip


@functools.cache
def maker(signature: Signature | None, fast_path: FastPath, regional: bool = False) -> Callable[..., Any]:
    """A function (_key, _op, _cast) → dispatcher. All dispatchers close over these three names, so their `__code__` can be exchanged."""
    parameters = "any call" if signature is None else ", ".join(p.name for p in signature.parameters)
    return _maker(f"{parameters}; {fast_path.condition or 'none'}", source(signature, fast_path, regional))


def source(signature: Signature | None, fast_path: FastPath, regional: bool = False) -> list[str]:
    """The source lines of a dispatcher for these parameters and this fast path."""
    return _any_call(fast_path, regional) if signature is None else _known_call(signature, fast_path, regional)


_numbers = itertools.count(1)


def _maker(title: str, dispatcher: list[str]) -> Callable[..., Any]:
    lines = ["def make(_key, _op, _cast):", *("    " + line for line in dispatcher)]
    lines += ["        if 0: _key, _op, _cast", "    return hmp_dispatcher"]
    name = f"<hmp {next(_numbers)}: {title}>"
    found: dict[str, Any] = {}
    exec(compile("\n".join(lines), name, "exec"), NAMES, found)
    # where tracebacks, debuggers and inspect fast_path for lines of source
    linecache.cache[name] = len(lines), None, [line + "\n" for line in lines], name
    made: Callable[..., Any] = found["make"]
    return made


# The code of a dispatcher that was not called yet under the casts that are in force.
FIRST_CALL: types.CodeType = _maker(
    "first call", ["def hmp_dispatcher(*args, **kwargs):", "    return specialise(_key, _op)(*args, **kwargs)"]
)(None, None, None).__code__  # fmt: skip


def _any_call(fast_path: FastPath, regional: bool) -> list[str]:
    target = "_op" if fast_path == PLAIN else "_cast"
    called = "return replacement_in_region(now, _key, _op)(*args, **kwargs)"
    if regional:
        state = [
            "    if not regions_open:",
            "        return _op(*args, **kwargs)",
            "    now = get().now",
            "    if now is not FOCUS:",
            f"        {called}",
        ]
    else:
        state = [
            "    if regions_open:",
            "        now = get().now",
            "        if now is OFF:",
            "            return _op(*args, **kwargs)",
            "        if now is not PROCESS:",
            f"            {called}",
        ]
    return ["def hmp_dispatcher(*args, **kwargs):", *state, f"    return {target}(*args, **kwargs)"]


class _Calls:
    """The lines that call something with what a dispatcher was called with: its parameters, whether given in the usual way or not."""

    def __init__(self, signature: Signature) -> None:
        if signature not in _SIGNATURES:
            _SIGNATURES.append(signature)
        names = ", ".join(p.name for p in signature.parameters)
        self.signature = signature
        self.remade = f"args, kwargs = given(SIGNATURES[{_SIGNATURES.index(signature)}], ({names},))"
        self.complete = [f"{p.name} is not NOT_GIVEN" for p in signature.usual if not p.default and not p.optional]

    def where(self, tests: list[str]) -> str:
        """Python source that is true for a usual call for which the tests hold."""
        return " and ".join([*tests, *_nothing_rare(self.signature)]) or "True"

    def returned(self, target: str, indent: str, cast: bool = False) -> list[str]:
        """Returns what `target` gives for a usual call; with `cast`, for what was cast."""
        lines = []
        for test, names in _usual_calls(self.signature):
            values = [p.name + ("_cast" if cast and _is_cast(p) else "") for p in names]
            call = ", ".join(f"{p.name}={value}" if p.by_keyword else value for p, value in zip(names, values, strict=True))
            lines += [f"{indent}if {test}:", f"{indent}    return {target}({call})"] if test else [f"{indent}return {target}({call})"]
        return lines

    def usual(self, target: str, indent: str, tests: list[str] | None = None) -> list[str]:
        """Returns what `target` gives where the call is a usual one, and the tests hold."""
        return [f"{indent}if {self.where(self.complete if tests is None else tests)}:", *self.returned(target, indent + "    ")]

    def any(self, target: str, indent: str) -> list[str]:
        """Returns what `target` gives, whatever the call is like."""
        return [*self.usual(target, indent), f"{indent}{self.remade}", f"{indent}return {target}(*args, **kwargs)"]

    def answered(self, indent: str) -> list[str]:
        """Lines of an `except`: tries again in float32 what torch's function raised with nothing left to cast (R11)."""
        found = "found = failed(_key, _cast, error, tuple(args), kwargs)"
        return [indent + line for line in (self.remade, found, "if found is GIVEN_UP: raise", "return found")]


def _known_call(signature: Signature, fast_path: FastPath, regional: bool = False) -> list[str]:
    calls = _Calls(signature)
    header = ", ".join(f"{p.name}={p.default or 'NOT_GIVEN'}" for p in signature.parameters)
    lines = [f"def hmp_dispatcher({header}):", *_asked(calls, regional)]
    if fast_path == PLAIN:
        return [*lines, *calls.any("_op", "    ")]
    condition = condition_of(signature, fast_path)
    no_tensor = ["    except AttributeError as error:", "        if error.__traceback__.tb_next is not None: raise"]
    if condition:
        lines += ["    try:", *calls.usual("_op", "        ", [condition]), *no_tensor]
        lines += ["    except RuntimeError as error:", *calls.answered("        ")]
    if condition and fast_path.casts:
        lines += [
            "    try:",
            f"        cast = {calls.where(calls.complete)}",
            "        if cast:",
            *_casts(signature, fast_path, "            "),
        ]
        lines += [*no_tensor, "        cast = False"]
        lines += ["    if cast:", "        try:", *calls.returned("_op", "            ", cast=True)]
        lines += ["        except RuntimeError as error:", *calls.answered("            ")]
    return [*lines, *calls.any("_cast", "    ")]


def _asked(calls: _Calls, regional: bool) -> list[str]:
    """Lines that ask which policy is in force, where it may be another one than the process's."""
    other = ["cast = replacement_in_region(now, _key, _op)", *calls.any("cast", "")]
    if regional:
        asked = ["    if not regions_open:", *calls.any("_op", "        "), "    now = get().now"]
        return [*asked, "    if now is not FOCUS:", *("        " + line for line in other)]
    off = ["        if now is OFF:", *calls.usual("_op", "            ")]
    asked = ["    if regions_open:", "        now = get().now", *off, "        if now is not PROCESS:"]
    return [*asked, *("            " + line for line in other)]


def _is_cast(parameter: Parameter) -> bool:
    """Whether what the parameter holds is cast here; a mask is cast by the wrapper, saturating (R12)."""
    return parameter.holds in ("tensor", "tensor?") and parameter.name != "attn_mask"


def _casts(signature: Signature, fast_path: FastPath, indent: str) -> list[str]:
    """Lines that cast the plain tensors among the arguments; they set `cast` to false where an argument is anything else."""
    to = str(fast_path.dtype).removeprefix("torch.")
    others = " or ".join(f"dtype is {d}" for d in ("float32", "bfloat16", "float16") if d != to)
    lines = []
    for p in signature.usual:
        if p.name == "attn_mask":
            taken = f"is bool_ or dtype is {to}"
            lines += [f"{indent}cast = cast and (attn_mask is None or (dtype := attn_mask.dtype) {taken})"]
        if not _is_cast(p):
            continue
        absent = f"{p.name} is not None and " if p.holds == "tensor?" else ""
        lines += [
            f"{indent}if {absent}(dtype := {p.name}.dtype) is not {to}:",
            f"{indent}    if ((kind := type({p.name})) is Tensor or kind is Parameter) and ({others}):",
            f"{indent}        {p.name}_cast = {fast_path.casts}({p.name}, {to})",
            f"{indent}    else:",
            f"{indent}        cast = False",
            f"{indent}else:",
            f"{indent}    {p.name}_cast = {p.name}",
        ]
    return lines


def _usual_calls(signature: Signature) -> list[tuple[str, tuple[Parameter, ...]]]:
    """The parameters that usual calls give, each time with a Python expression that is true for such a call, "" for always."""
    required = tuple(p for p in signature.usual if not p.optional)
    optional = [p for p in signature.usual if p.optional]
    if not optional:
        return [("", required)]
    none = [f"{optional[0].name} is NOT_GIVEN", *(f"{p.name} is {p.default}" for p in optional[1:])]
    return [(f"{optional[0].name} is not NOT_GIVEN", signature.usual), (" and ".join(none), required)]


def _nothing_rare(signature: Signature) -> list[str]:
    """Python expressions that are true where none of the parameters is given that are rarely given.

    The first one catches calls with too many arguments. numpy's name for a parameter that must be given need not be looked at: a call
    that gives both is one that torch refuses.
    """
    named = {alias for p in signature.usual if not p.default and not p.optional for alias in ALIASES.get(p.name, ())}
    return [f"{p.name} is {p.default or 'NOT_GIVEN'}" for i, p in enumerate(signature.rare) if i == 0 or p.name not in named]
