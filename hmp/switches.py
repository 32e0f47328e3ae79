"""The functions that stand at torch's places: each asks what is in force here, and calls that, or torch's own op.

A switch is made once and keeps its identity; what it does where the process's policy is in force is its code, exchanged when that policy
changes. For a builtin whose signature is known the code looks at the dtypes of exactly the parameters that hold tensors, and calls
the op at once where there is nothing to cast.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from . import state
from .call_rules import CallRule
from .casting import FINITE_MAX
from .signatures import ALIASES, Parameter, Signature

Glance = Literal["", "plain", "dtype", "same", "number", "norm", "attention"]


class _NotGiven:
    """Stands for an argument that a call did not give. Its dtype is none that a tensor has."""

    dtype = None

    def __repr__(self) -> str:
        return "..."


NOT_GIVEN = _NotGiven()


@dataclass(frozen=True)
class Look:
    """How a switch sees that there is nothing to cast: `glance`, and the dtype that the rule casts to."""

    glance: Glance
    dtype: torch.dtype | None = None


PLAIN, NO_LOOK = Look("plain"), Look("")


def look_for(rule: CallRule) -> Look:
    """The look that tells, for a call under `rule`, that there is nothing to do but calling the op."""
    dtype = {"bf16": rule.low, "fp32": torch.float32}.get(rule.kind)
    if dtype is not None and (rule.no_kernel or rule.no_backward_kernel) and dtype is not torch.float32:
        return NO_LOOK
    if rule.op in ("batch_norm", "layer_norm", "group_norm"):
        return Look("norm", dtype) if dtype is not None else NO_LOOK
    if rule.op == "scaled_dot_product_attention":
        return Look("attention", dtype) if dtype is not None else NO_LOOK
    if rule.kind == "guard":
        return Look("number")
    if dtype is not None:
        return Look("dtype", dtype)
    if rule.kind in ("promote", "first") and not rule.arithmetic and not rule.fill:
        return Look("same")
    return NO_LOOK


def make(key: Any, op: Callable[..., Any], signature: Signature | None, look: Look = PLAIN) -> Any:
    """A switch for torch's function `key`, which calls `op` until it is told of a policy. `look` is what it will be told, if known."""
    switch = _maker(signature, look)(key, op, op)
    _made.setdefault(key, []).append((switch, signature))
    return switch


def tell(key: Any, cast: Any, look: Look) -> None:
    """Has the switches for `key` call `cast` where the process's policy is in force, or torch's own op for None."""
    if cast is None:
        look = PLAIN
    elif getattr(cast, "failed", None):
        look = NO_LOOK
    for switch, signature in _made[key]:
        call, _, op = switch.__closure__  # in the order of their names: _cast, _key, _op
        call.cell_contents = op.cell_contents if cast is None else cast
        # last: until here the old code casts by the new rule, which is as right
        switch.__code__ = _code(signature, look)


def release() -> None:
    """Has every switch call torch's own op. The code stays: it looks, and calls the op in either case."""
    for switch, _ in (each for switches in _made.values() for each in switches):
        call, _, op = switch.__closure__
        call.cell_contents = op.cell_contents


def made() -> tuple[Any, ...]:
    """The torch functions that have a switch."""
    return tuple(_made)


def forget() -> None:
    """No switch stands anywhere any more."""
    _made.clear()


# torch's function → its switches, with the signature that they were made for. torch.mm and torch._VF.mm are two objects that are equal.
_made: dict[Any, list[tuple[Any, Signature | None]]] = {}


def elsewhere(here: Any, key: Any, op: Callable[..., Any]) -> Callable[..., Any]:
    """What is called for torch's function `key` under `here`, which is not the process's casts."""
    found: Callable[..., Any] = (here or state.settle()).table.get(key, op)
    return found


def failed(key: Any, cast: Any, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What comes of a call that raised `error` with nothing to cast (R11); the error where that is not a kernel's absence."""
    if not hasattr(cast, "again"):
        raise error
    result = cast.again(error, args, kwargs)
    if cast.failed and key in _made:
        tell(key, cast, NO_LOOK)  # from now on the wrapper asks what is remembered
    return result


def given(signature: Signature, values: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    """A call as it was made, of the values of all parameters: positional arguments as far as they go, the others by name."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for i, (parameter, value) in enumerate(zip(signature.parameters, values, strict=True)):
        is_default = value is NOT_GIVEN or _is_default(value, parameter)
        if is_default and (value is NOT_GIVEN or parameter.holds == "absent" or len(args) < i):
            continue
        if len(args) == i and not parameter.by_keyword:
            args.append(value)
        else:
            kwargs[parameter.name] = value
    return args, kwargs


def _is_default(value: Any, parameter: Parameter) -> bool:
    return isinstance(value, (int, float, str, type(None))) and repr(value) == parameter.default


_SIGNATURES: list[Signature] = []  # those that switches were made for; generated code refers to them by number
_NAMES: dict[str, Any] = {
    "live": state.live, "get": state.get, "PROCESS": state.PROCESS, "OFF": state.PROCESS.off, "elsewhere": elsewhere, "failed": failed,
    "given": given, "NOT_GIVEN": NOT_GIVEN, "Tensor": torch.Tensor, "Parameter": torch.nn.Parameter, "float32": torch.float32,
    "bfloat16": torch.bfloat16, "float16": torch.float16, "bool_": torch.bool, "__name__": __name__,
    "SIGNATURES": _SIGNATURES,
    "LIMIT": FINITE_MAX[torch.float16],
}  # fmt: skip


@functools.cache
def _maker(signature: Signature | None, look: Look) -> Callable[..., Any]:
    """_key, _op, _cast → a switch. All switches of a signature close over the same names, so that their code can be exchanged."""
    lines = ["def make(_key, _op, _cast):"]
    lines += ["    " + line for line in (_any_call(look) if signature is None else _known_call(signature, look))]
    lines += ["        if 0: _key, _op, _cast", "    return hmp_switch"]
    found: dict[str, Any] = {}
    exec(compile("\n".join(lines), "<hmp>", "exec"), _NAMES, found)
    made: Callable[..., Any] = found["make"]
    return made


@functools.cache
def _code(signature: Signature | None, look: Look) -> types.CodeType:
    code: types.CodeType = _maker(signature, look)(None, None, None).__code__
    return code


def _any_call(look: Look) -> list[str]:
    target = "_op" if look == PLAIN else "_cast"
    return f"""\
def hmp_switch(*args, **kwargs):
    if live:
        here = get()
        if here is OFF:
            return _op(*args, **kwargs)
        if here is not PROCESS:
            return elsewhere(here, _key, _op)(*args, **kwargs)
    return {target}(*args, **kwargs)""".splitlines()


def _known_call(signature: Signature, look: Look) -> list[str]:
    parameters = signature.parameters
    if signature not in _SIGNATURES:
        _SIGNATURES.append(signature)
    remade = f"args, kwargs = given(SIGNATURES[{_SIGNATURES.index(signature)}], ({', '.join(p.name for p in parameters)},))"
    header = ", ".join(f"{p.name}={p.default or 'NOT_GIVEN'}" for p in parameters)
    complete = [f"{p.name} is not NOT_GIVEN" for p in signature.usual if not p.default and not p.optional]

    def usual_calls(target: str, indent: str, tests: list[str]) -> list[str]:
        """Returns from the call where it is a usual one."""
        lines = [f"{indent}if {' and '.join(filter(None, (*tests, *_nothing_rare(signature))))}:"]
        for test, names in _usual_calls(signature):
            call = f"{target}({', '.join(f'{p.name}={p.name}' if p.by_keyword else p.name for p in names)})"
            lines += [f"{indent}    if {test}:", f"{indent}        return {call}"] if test else [f"{indent}    return {call}"]
        return lines

    lines = [
        f"def hmp_switch({header}):",
        "    if live:",
        "        here = get()",
        "        if here is OFF:",
        *usual_calls("_op", "            ", complete),
        "        if here is not PROCESS:",
        "            cast = elsewhere(here, _key, _op)",
        *usual_calls("cast", "            ", complete),
        f"            {remade}",
        "            return cast(*args, **kwargs)",
    ]
    if look == PLAIN:
        return [*lines, *usual_calls("_op", "    ", complete), f"    {remade}", "    return _op(*args, **kwargs)"]
    condition = _condition(signature, look)
    if condition:
        lines += [
            "    try:",
            *usual_calls("_op", "        ", [condition]),
            "    except AttributeError as error:",
            "        if error.__traceback__.tb_next is not None: raise",
            "    except RuntimeError as error:",
            f"        {remade}",
            "        return failed(_key, _cast, error, tuple(args), kwargs)",
        ]
    return [*lines, *usual_calls("_cast", "    ", complete), f"    {remade}", "    return _cast(*args, **kwargs)"]


def _usual_calls(signature: Signature) -> list[tuple[str, tuple[Parameter, ...]]]:
    """What usual calls give, with Python source that is true for it, "" for always."""
    required = tuple(p for p in signature.usual if not p.optional)
    optional = [p for p in signature.usual if p.optional]
    if not optional:
        return [("", required)]
    none = [f"{optional[0].name} is NOT_GIVEN", *(f"{p.name} is {p.default}" for p in optional[1:])]
    return [(f"{optional[0].name} is not NOT_GIVEN", signature.usual), (" and ".join(none), required)]


def _nothing_rare(signature: Signature) -> list[str]:
    """Python source that is true where no parameter is given that is rarely given.

    The first one catches calls with too many arguments. numpy's name for a parameter that must be given need not be looked at: a call
    that gives both is one that torch refuses.
    """
    named = {alias for p in signature.usual if not p.default and not p.optional for alias in ALIASES.get(p.name, ())}
    return [f"{p.name} is {p.default or 'NOT_GIVEN'}" for i, p in enumerate(signature.rare) if i == 0 or p.name not in named]


def _condition(signature: Signature, look: Look) -> str:
    """Python source that is true where nothing is to be cast; "" where no look tells."""
    dtype = str(look.dtype).removeprefix("torch.")
    usual = signature.usual
    missing = [f"{p.name} is not NOT_GIVEN" for p in usual if p.holds == "other" and not p.default and not p.optional]
    if look.glance == "norm":
        return " and ".join([*_norm_condition(signature, dtype), *missing])
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
            tests.append(f"({p.name} is None or (kind := {p.name}.dtype) is bool_ or kind is {dtype} or kind is float32)")
        elif p.holds == "tensor":
            tests.append(is_it)
        elif p.holds == "tensor?":
            tests.append(f"({p.name} is None or {is_it})")
        elif p.holds == "number":
            tests.append(f"({is_it} if (kind := type({p.name})) is Tensor or kind is Parameter else {_small_number(p.name)})")
    return " and ".join(tests + missing)


def _small_number(name: str) -> str:
    return f"(type({name}) is float or type({name}) is int) and -LIMIT <= {name} <= LIMIT"


def _norm_condition(signature: Signature, dtype: str) -> list[str]:
    """The input is as it is to be, and the rest is absent, or all of it in that dtype, or all in float32 where a kernel takes that."""
    state = [p.name for p in signature.usual if p.holds == "tensor?"]
    first, *others = state
    rest = "".join(f" and ({n} is None or {n}.dtype is held)" for n in others)
    absent = " and ".join(f"{n} is None" for n in state)
    mixed = f"(held := {first}.dtype) is {dtype} or held is float32 and {signature.usual[0].name}.is_cpu"
    return [
        f"{signature.usual[0].name}.dtype is {dtype}",
        f"(({mixed}){rest} if {first} is not None and {first} is not NOT_GIVEN else {absent})",
    ]
