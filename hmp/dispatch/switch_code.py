"""Python source for switches: one for each builtin's parameters and each fast path.

The fast path reads the arguments' dtypes: where they are right, the switch calls the op; plain tensors it casts by itself; for any other
call it calls the wrapper.
Over a bare forwarder generated code adds 80 to 200 ns to a call where one function for any arguments adds 190 to 260.
docs/architecture.md shows what is written for `linear`; in a traceback, a debugger and `inspect.getsource(F.linear.__code__)` its lines
are found too.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from ..caches import cast_cache
from ..casting import FINITE_MAX, tensor_casts
from ..context import state
from ..ops import ALIASES, Parameter, Signature, op_facts
from ..wrapping import OpRule

Glance = Literal["", "plain", "dtype", "same", "number", "wide", "written", "norm", "attention"]


class _NotGiven:
    """Stands for an argument that a call did not give. Its dtype is none that a tensor has."""

    dtype = None

    def __repr__(self) -> str:
        return "..."


NOT_GIVEN = _NotGiven()


class FastPath(NamedTuple):
    """What a switch looks at to see that a call has nothing to cast: `glance` names the test, `dtype` is the one that the rule casts to.

    `casts` names the function with which the switch itself casts plain tensors; with "" it leaves that to the wrapper.
    """

    glance: Glance
    dtype: torch.dtype | None = None
    casts: Literal["", "CAST", "CAST_PRODUCT_INPUT"] = ""


PLAIN, NO_FAST_PATH = FastPath("plain"), FastPath("")


def fast_path_of(rule: OpRule) -> FastPath:
    """The fast path for an op under `rule`, NO_FAST_PATH where only the wrapper can tell whether there is something to cast."""
    dtype = rule.dtype
    if dtype is not None and rule.asks_for_kernels:
        return NO_FAST_PATH
    if rule.op in ("batch_norm", "layer_norm", "group_norm"):
        # on the promote list a wide weight widens the input
        return NO_FAST_PATH if rule.kind == "promote" else FastPath("norm", dtype)
    if rule.op == "scaled_dot_product_attention":
        return FastPath("attention", dtype, "CAST_PRODUCT_INPUT") if dtype is not None else NO_FAST_PATH
    if rule.kind == "guard":
        return FastPath("number")
    if rule.kind in ("fill", "mask_in_place", "guard_in_place"):
        return FastPath("wide")  # nothing overflows float32
    if rule.op == "setitem":
        return FastPath("written")
    if dtype is not None:
        care = rule.keep or rule.view or rule.score_taker or rule.mask_taker or rule.saturates
        return FastPath("dtype", dtype, "" if care else "CAST_PRODUCT_INPUT" if rule.op in op_facts.PRODUCTS else "CAST")
    if rule.kind in ("promote", "first") and not rule.asks_for_kernels and not rule.saturates:
        return FastPath("same")
    return NO_FAST_PATH


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


_SIGNATURES: list[Signature] = []  # those that switches were made for; generated code refers to them by number
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
def maker(signature: Signature | None, look: FastPath, regional: bool = False) -> Callable[..., Any]:
    """A function (_key, _op, _cast) → switch. All switches close over these three names, so that their `__code__` can be exchanged."""
    parameters = "any call" if signature is None else ", ".join(p.name for p in signature.parameters)
    return _maker(f"{parameters}; {look.glance or 'no look'}", source(signature, look, regional))


def source(signature: Signature | None, look: FastPath, regional: bool = False) -> list[str]:
    """The source lines of a switch for these parameters and this fast path."""
    return _any_call(look, regional) if signature is None else _known_call(signature, look, regional)


_numbers = itertools.count(1)


def _maker(title: str, switch: list[str]) -> Callable[..., Any]:
    lines = ["def make(_key, _op, _cast):", *("    " + line for line in switch)]
    lines += ["        if 0: _key, _op, _cast", "    return hmp_switch"]
    name = f"<hmp {next(_numbers)}: {title}>"
    found: dict[str, Any] = {}
    exec(compile("\n".join(lines), name, "exec"), NAMES, found)
    # where tracebacks, debuggers and inspect look for lines of source
    linecache.cache[name] = len(lines), None, [line + "\n" for line in lines], name
    made: Callable[..., Any] = found["make"]
    return made


# The code of a switch that was not called yet under the casts that are in force.
FIRST_CALL: types.CodeType = _maker(
    "first call", ["def hmp_switch(*args, **kwargs):", "    return specialise(_key, _op)(*args, **kwargs)"]
)(None, None, None).__code__  # fmt: skip


def _any_call(look: FastPath, regional: bool) -> list[str]:
    target = "_op" if look == PLAIN else "_cast"
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
    return ["def hmp_switch(*args, **kwargs):", *state, f"    return {target}(*args, **kwargs)"]


class _Calls:
    """The lines that call something with what a switch was called with: its parameters, whether given in the usual way or not."""

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


def _known_call(signature: Signature, look: FastPath, regional: bool = False) -> list[str]:
    calls = _Calls(signature)
    header = ", ".join(f"{p.name}={p.default or 'NOT_GIVEN'}" for p in signature.parameters)
    lines = [f"def hmp_switch({header}):", *_asked(calls, regional)]
    if look == PLAIN:
        return [*lines, *calls.any("_op", "    ")]
    condition = _condition(signature, look)
    no_tensor = ["    except AttributeError as error:", "        if error.__traceback__.tb_next is not None: raise"]
    if condition:
        lines += ["    try:", *calls.usual("_op", "        ", [condition]), *no_tensor]
        lines += ["    except RuntimeError as error:", *calls.answered("        ")]
    if condition and look.casts:
        lines += ["    try:", f"        cast = {calls.where(calls.complete)}", "        if cast:", *_casts(signature, look, "            ")]
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


def _casts(signature: Signature, look: FastPath, indent: str) -> list[str]:
    """Lines that cast the plain tensors among the arguments; they set `cast` to false where an argument is anything else."""
    to = str(look.dtype).removeprefix("torch.")
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
            f"{indent}        {p.name}_cast = {look.casts}({p.name}, {to})",
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


def _condition(signature: Signature, look: FastPath) -> str:  # noqa: C901, PLR0912
    """A Python expression that is true where nothing is to be cast; "" where none can tell."""
    dtype = str(look.dtype).removeprefix("torch.")
    usual = signature.usual
    missing = [f"{p.name} is not NOT_GIVEN" for p in usual if p.holds == "other" and not p.default and not p.optional]
    if look.glance == "wide":
        return " and ".join([f"{usual[0].name}.dtype is float32", *missing])
    if look.glance == "written":
        into, value = usual[0].name, usual[-1].name
        number = f"(kind := type({value})) is float or kind is int or kind is bool"
        taken = f"(({number}) or {value}.dtype is dtype)"
        return " and ".join([f"((dtype := {into}.dtype) is float32 or dtype is int64 or dtype is bool_)", taken, *missing])
    if look.glance == "norm":
        return " and ".join([*_norm_condition(signature, look), *missing])
    tests = []
    first = ""
    for p in usual:
        if p.holds == "tensors":
            return ""
        if look.glance == "number":
            if p.holds == "tensor":
                tests.append(f"(type({p.name}) is Tensor or type({p.name}) is Parameter)")
            elif p.holds == "number":
                tests.append(f"(type({p.name}) is Tensor or type({p.name}) is Parameter or {_small_number(p.name)})")
            continue
        if look.glance == "same":
            is_it = f"{p.name}.dtype is " + (first or "(dtype := ...)")
            if p.holds in ("tensor", "tensor?", "number") and not first:
                tests.append(f"(dtype := {p.name}.dtype) is not None")
                first = "dtype"
                continue
        else:
            is_it = f"{p.name}.dtype is {dtype}"
        if look.glance == "attention" and p.name == "attn_mask":
            tests.append(f"({p.name} is None or (kind := {p.name}.dtype) is bool_ or kind is {dtype})")
        elif p.holds == "tensor":
            tests.append(is_it)
        elif p.holds == "tensor?":
            tests.append(f"({p.name} is None or {is_it})")
        elif p.holds == "number":
            tests.append(f"({is_it} if (kind := type({p.name})) is Tensor or kind is Parameter else {_small_number(p.name)})")
    return " and ".join(tests + missing)


def _small_number(name: str) -> str:
    return f"(type({name}) is float or type({name}) is int) and -LIMIT <= {name} <= LIMIT"


def _norm_condition(signature: Signature, look: FastPath) -> list[str]:
    """The input is as it is to be, and the rest is absent, or all of it in that dtype, or all in float32 where a kernel takes that."""
    state = [p.name for p in signature.usual if p.holds == "tensor?"]
    first, *others = state
    rest = "".join(f" and ({n} is None or {n}.dtype is held)" for n in others)
    absent = " and ".join(f"{n} is None" for n in state)
    given = signature.usual[0].name
    if look.dtype is None:  # unlisted: the input is as it is, where it is low or float32
        wanted, of_input = "dtype", f"((dtype := {given}.dtype) is float32 or dtype is bfloat16 or dtype is float16)"
    else:
        wanted = str(look.dtype).removeprefix("torch.")
        of_input = f"{given}.dtype is {wanted}"
    mixed = f"(held := {first}.dtype) is {wanted} or held is float32 and {given}.is_cpu"
    return [of_input, f"(({mixed}){rest} if {first} is not None and {first} is not NOT_GIVEN else {absent})"]
