"""Writes the Python source of dispatchers, one for each builtin's parameters and each fast path.

If the fast path's condition is true, a dispatcher calls the op with what it was called with. Otherwise it casts plain tensors by itself,
and calls the wrapper for anything else. Generated code adds 80 to 200 ns to a call, one function for any arguments would add 190 to 260.
docs/pages/explain/architecture.md shows the source for `linear`; tracebacks, debuggers and `inspect.getsource(F.linear.__code__)` show it
too.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import types
from collections.abc import Callable
from typing import Any

import torch

from ..caches import cast_cache, shared_cast, weight_cache
from ..casting import FINITE_MAX, tensor_casts
from ..context import state
from ..ops import ALIASES, Parameter, Signature
from ..torch_private import is_functorchs, trace_here
from .fast_path import PLAIN, FastPath, condition_of, on_device


class _NotGiven:
    """The default of a parameter for which a call gave no argument. Its dtype None equals no tensor's dtype."""

    dtype = None

    def __repr__(self) -> str:
        return "..."


NOT_GIVEN = _NotGiven()


def replacement_in_region(now: Any, key: Any, op: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper of torch's function `key` in the state `now`, the state in force for None; `op`, torch's own, where it has none."""
    found: Callable[..., Any] = (now or state.current_state()).replacements.get(key, op)
    return found


def call_arguments(signature: Signature, values: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of a call, from the values of all parameters; those that the call did not give are left out."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    defaults = 0  # how many at the end of args: left out, because the call may give the parameter by numpy's name
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


_SIGNATURES: list[Signature] = []  # of the dispatchers; generated code refers to them by index
NAMES: dict[str, Any] = {
    "regions_open": state.regions_open, "get": state.get, "PROCESS": state.PROCESS, "OFF": state.PROCESS.off,
    "replacement_in_region": replacement_in_region,
    "call_arguments": call_arguments, "NOT_GIVEN": NOT_GIVEN, "Tensor": torch.Tensor, "Parameter": torch.nn.Parameter,
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "bool_": torch.bool, "int64": torch.int64,
    "__name__": __name__, "SIGNATURES": _SIGNATURES,
    "SPECIALISED_FOR": state.PROCESS, "LIMIT": FINITE_MAX[torch.float16], "CAST": tensor_casts.cast, "WITHIN": tensor_casts.within,
    "CAST_PRODUCT_INPUT": cast_cache.cast_product_input, "CAST_WEIGHTS": cast_cache.cast_weights,
    "CAST_RECURRENT": cast_cache.cast_recurrent,
    "used_once": weight_cache.used_once, "shared_cast": shared_cast, "TO": tensor_casts.TO,
    "strided": torch.strided, "grad_enabled": torch.is_grad_enabled, "trace_here": trace_here,
    "is_functorchs": is_functorchs,
}  # fmt: skip


@functools.cache
def maker(signature: Signature | None, fast_path: FastPath, regional: bool = False) -> Callable[..., Any]:
    """A function (_key, _op, _cast) → dispatcher. All dispatchers close over these three names, so their `__code__` can be exchanged.

    With `regional` it is specialised for the policy of a region or module, while the process has none."""
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
    # where tracebacks, debuggers and inspect look for lines of source
    linecache.cache[name] = len(lines), None, [line + "\n" for line in lines], name
    made: Callable[..., Any] = found["make"]
    return made


# The code of a dispatcher that has not been called since specialise_for().
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
            "    if now is not SPECIALISED_FOR:",
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
    """Writes lines that call a function with the arguments that a dispatcher was called with. A usual call gives no rare parameter."""

    def __init__(self, signature: Signature) -> None:
        if signature not in _SIGNATURES:
            _SIGNATURES.append(signature)
        names = ", ".join(p.name for p in signature.parameters)
        self.signature = signature
        self.remade = f"args, kwargs = call_arguments(SIGNATURES[{_SIGNATURES.index(signature)}], ({names},))"
        self.complete = [f"{p.name} is not NOT_GIVEN" for p in signature.usual if not p.default and not p.optional]

    def where(self, tests: list[str]) -> str:
        """A Python expression that is true for a usual call for which the tests are true."""
        return " and ".join([*tests, *_nothing_rare(self.signature)]) or "True"

    def returned(self, target: str, indent: str, cast: bool = False) -> list[str]:
        """Lines that return `target(...)` for a usual call; with `cast`, of the arguments that were cast."""
        lines = []
        for test, names in _usual_calls(self.signature):
            values = [p.name + ("_cast" if cast and _is_cast(p) else "") for p in names]
            call = ", ".join(f"{p.name}={value}" if p.by_keyword else value for p, value in zip(names, values, strict=True))
            lines += [f"{indent}if {test}:", f"{indent}    return {target}({call})"] if test else [f"{indent}return {target}({call})"]
        return lines

    def usual(self, target: str, indent: str, tests: list[str] | None = None) -> list[str]:
        """Lines that return `target(...)` if the call is a usual one and the tests are true."""
        return [f"{indent}if {self.where(self.complete if tests is None else tests)}:", *self.returned(target, indent + "    ")]

    def any(self, target: str, indent: str) -> list[str]:
        """Lines that return `target(...)` for any call."""
        return [*self.usual(target, indent), f"{indent}{self.remade}", f"{indent}return {target}(*args, **kwargs)"]

    def answered(self, indent: str) -> list[str]:
        """Lines of an `except` around a call with nothing left to cast: they run it in float32 if torch lacks a kernel (R11)."""
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
            f"        cast = {calls.where([*calls.complete, *([on_device(signature)] if fast_path.off_cpu else [])])}",
            "        if cast:",
            *_casts(signature, fast_path, "            "),
        ]
        lines += [*no_tensor, "        cast = False"]
        lines += ["    if cast:", "        try:", *calls.returned("_op", "            ", cast=True)]
        lines += ["        except RuntimeError as error:", *calls.answered("            ")]
    return [*lines, *calls.any("_cast", "    ")]


def _asked(calls: _Calls, regional: bool) -> list[str]:
    """Lines for a call under another state than the one that the dispatcher is specialised for."""
    other = ["cast = replacement_in_region(now, _key, _op)", *calls.any("cast", "")]
    if regional:
        asked = ["    if not regions_open:", *calls.any("_op", "        "), "    now = get().now"]
        return [*asked, "    if now is not SPECIALISED_FOR:", *("        " + line for line in other)]
    off = ["        if now is OFF:", *calls.usual("_op", "            ")]
    asked = ["    if regions_open:", "        now = get().now", *off, "        if now is not PROCESS:"]
    return [*asked, *("            " + line for line in other)]


def _is_cast(parameter: Parameter) -> bool:
    """Whether the dispatcher casts the parameter's tensor."""
    return parameter.holds in ("tensor", "tensor?")


def _casts(signature: Signature, fast_path: FastPath, indent: str) -> list[str]:
    """Lines that cast the arguments if all are plain tensors, and set `cast` to False if one is anything else."""
    to = str(fast_path.dtype).removeprefix("torch.")
    others = " or ".join(f"its_dtype is {d}" for d in ("float32", "bfloat16", "float16") if d != to)
    lines = []
    for p in signature.usual:
        if not _is_cast(p):
            continue
        if p.name == "attn_mask":
            lines += _mask_cast(fast_path, others, indent)
            continue
        absent = f"{p.name} is not None and " if p.holds == "tensor?" else ""
        lines += [
            f"{indent}if {absent}(its_dtype := {p.name}.dtype) is not {to}:",
            f"{indent}    if ((kind := type({p.name})) is Tensor or kind is Parameter) and ({others}):",
            *_cast_of(p.name, fast_path, indent + "        "),
            f"{indent}    else:",
            f"{indent}        cast = False",
            f"{indent}else:",
            f"{indent}    {p.name}_cast = {p.name}",
        ]
    return lines


def _mask_cast(fast_path: FastPath, others: str, indent: str) -> list[str]:
    """Lines that cast a plain mask of numbers, saturating (R12); one of bools stays."""
    to = str(fast_path.dtype).removeprefix("torch.")
    return [
        f"{indent}if attn_mask is None or (its_dtype := attn_mask.dtype) is bool_ or its_dtype is {to}:",
        f"{indent}    attn_mask_cast = attn_mask",
        f"{indent}elif ((kind := type(attn_mask)) is Tensor or kind is Parameter) and ({others}):",
        f"{indent}    mask = WITHIN(attn_mask, {to})",
        *_cast_of("mask", fast_path, indent + "    "),
        f"{indent}    attn_mask_cast = mask_cast",
        f"{indent}else:",
        f"{indent}    cast = False",
    ]


def _cast_of(name: str, fast_path: FastPath, indent: str) -> list[str]:
    """Lines that cast one plain tensor; `kind` is its class."""
    to = str(fast_path.dtype).removeprefix("torch.")
    cast = f"{name}_cast = {fast_path.casts}({name}, {to})"
    if fast_path.casts != "CAST_PRODUCT_INPUT":
        return [indent + cast]
    # what the caches would not keep is cast here: asking them takes as long as the cast
    small = f"{name}.layout is strided and (size := {name}.nbytes) < shared_cast.least"
    used_once = f"(kind is Tensor or id({name}) in used_once)"
    unshared = f"{name}.requires_grad and grad_enabled() and {used_once} or kind is Tensor and size < shared_cast.WORTH_KEEPING"
    # in a trace always: torch.jit compares the lines of a trace that was made with gradients with those of one made without
    uncached = f"{small} and ({unshared} or trace_here() is not None)"
    return [f"{indent}if {uncached}:", f"{indent}    {name}_cast = TO[{to}]({name})", f"{indent}else:", f"{indent}    {cast}"]


def _usual_calls(signature: Signature) -> list[tuple[str, tuple[Parameter, ...]]]:
    """Pairs of a Python expression and the parameters that a usual call gives for which it is true; "" is true for all."""
    required = tuple(p for p in signature.usual if not p.optional)
    optional = [p for p in signature.usual if p.optional]
    if not optional:
        return [("", required)]
    none = [f"{optional[0].name} is NOT_GIVEN", *(f"{p.name} is {p.default}" for p in optional[1:])]
    return [(f"{optional[0].name} is not NOT_GIVEN", signature.usual), (" and ".join(none), required)]


def _nothing_rare(signature: Signature) -> list[str]:
    """Python expressions that are true for a call that gives none of the rare parameters.

    The first rare one is always among them: it tells calls with too many arguments. numpy's names of required parameters are not, because
    torch refuses a call that gives both names.
    """
    named = {alias for p in signature.usual if not p.default and not p.optional for alias in ALIASES.get(p.name, ())}
    return [f"{p.name} is {p.default or 'NOT_GIVEN'}" for i, p in enumerate(signature.rare) if i == 0 or p.name not in named]
