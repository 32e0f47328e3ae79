"""Fast paths: the Python expressions by which a dispatcher sees, without its wrapper, that a call has nothing to cast."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ..ops import Parameter, Signature, op_facts
from ..wrapping import OpRule, float32_products

# "": only the wrapper can tell. "plain": there never is anything to cast. "dtype": every tensor has the rule's dtype. "same": all tensors
# have one dtype. "number": every argument is a tensor or a number that fits float16. "wide": the first tensor is float32. "written": the
# value of an item assignment fits the tensor that it is written into. "norm": input and state are as the norm's kernel takes them.
# "attention": as "dtype", and the mask is bool, of that dtype, or absent.
Condition = Literal["", "plain", "dtype", "same", "number", "wide", "written", "norm", "attention"]


CastName = Literal["", "CAST", "CAST_WEIGHTS", "CAST_RECURRENT", "CAST_PRODUCT_INPUT"]


class FastPath(NamedTuple):
    """How a dispatcher sees that a call has nothing to cast: `condition` says by what, `dtype` is the one that the rule casts to.

    `casts` names the function with which the dispatcher itself casts plain tensors; with "" it leaves that to the wrapper. With `off_cpu`
    the wrapper gets every call on CPU tensors: the op may have to compute in float32 (R11).
    """

    condition: Condition
    dtype: torch.dtype | None = None
    casts: CastName = ""
    off_cpu: bool = False


PLAIN, NO_FAST_PATH = FastPath("plain"), FastPath("")


def fast_path_of(rule: OpRule) -> FastPath:
    """The fast path for an op under `rule`, NO_FAST_PATH where only the wrapper can tell whether there is something to cast."""
    found = _fast_path_of(rule)
    return found._replace(off_cpu=True) if found.condition and rule.dtype is not torch.float32 and float32_products.applies(rule) else found


def _fast_path_of(rule: OpRule) -> FastPath:
    dtype = rule.dtype
    if rule.kind == "fp8" or rule.saved or (dtype is not None and rule.asks_for_kernels):
        return NO_FAST_PATH
    if rule.op in ("batch_norm", "layer_norm", "group_norm"):
        # on the promote list a float32 weight makes the input float32
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
        return FastPath("dtype", dtype, "" if care else _cast_name(rule.op))
    if rule.kind in ("promote", "first") and not rule.asks_for_kernels and not rule.saturates:
        return FastPath("same")
    return NO_FAST_PATH


def _cast_name(op: str) -> CastName:
    if op in op_facts.PRODUCTS:
        return "CAST_PRODUCT_INPUT"
    if op in op_facts.CELLS:
        return "CAST_WEIGHTS"
    return "CAST_RECURRENT" if op in op_facts.RECURRENT else "CAST"


def condition_of(signature: Signature, fast_path: FastPath) -> str:
    """Python source that is true for a call with these parameters that has nothing to cast; "" where no expression can tell."""
    usual = signature.usual
    if not fast_path.condition:
        return ""
    if fast_path.condition == "wide":
        tests = [f"{usual[0].name}.dtype is float32"]
    elif fast_path.condition == "written":
        tests = _written(usual[0].name, usual[-1].name)
    elif fast_path.condition == "norm":
        tests = _norm(signature, fast_path)
    elif any(p.holds == "tensors" for p in usual):
        return ""
    elif fast_path.condition == "number":
        tests = _numbers(usual)
    elif fast_path.condition == "same":
        tests = _same_dtype(usual)
    else:
        tests = _of_dtype(usual, _name(fast_path.dtype))
    tests += [on_device(signature)] if fast_path.off_cpu else []
    required = [f"{p.name} is not NOT_GIVEN" for p in usual if p.holds == "other" and not p.default and not p.optional]
    return " and ".join(tests + required)


def on_device(signature: Signature) -> str:
    """Python source that is true for a call whose first tensor is not on the CPU."""
    return f"{signature.usual[0].name}.is_cpu is False"  # not `not`: of what torch.fx traces no truth is known


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _written(into: str, value: str) -> list[str]:
    number = f"(kind := type({value})) is float or kind is int or kind is bool"
    taken = f"(({number}) or {value}.dtype is its_dtype)"
    return [f"((its_dtype := {into}.dtype) is float32 or its_dtype is int64 or its_dtype is bool_)", taken]


def _numbers(parameters: tuple[Parameter, ...]) -> list[str]:
    tests = []
    for p in parameters:
        plain = f"type({p.name}) is Tensor or type({p.name}) is Parameter"
        if p.holds == "tensor":
            tests.append(f"({plain})")
        elif p.holds == "number":
            tests.append(f"({plain} or {_small_number(p.name)})")
    return tests


def _same_dtype(parameters: tuple[Parameter, ...]) -> list[str]:
    """Tests that all tensors have one dtype; the first one's is assigned to `its_dtype`, for `dtype` may be a parameter."""
    tensors = [p for p in parameters if p.holds in ("tensor", "tensor?", "number")]
    return [f"(its_dtype := {tensors[0].name}.dtype) is not None", *(_has_dtype(p, "its_dtype") for p in tensors[1:])] if tensors else []


def _of_dtype(parameters: tuple[Parameter, ...], dtype: str) -> list[str]:
    return [_has_dtype(p, dtype) for p in parameters if p.holds in ("tensor", "tensor?", "number")]


def _has_dtype(parameter: Parameter, dtype: str) -> str:
    name = parameter.name
    if name == "attn_mask":
        return f"({name} is None or (kind := {name}.dtype) is bool_ or kind is {dtype})"
    is_it = f"{name}.dtype is {dtype}"
    if parameter.holds == "tensor?":
        return f"({name} is None or {is_it})"
    if parameter.holds == "number":
        return f"({is_it} if (kind := type({name})) is Tensor or kind is Parameter else {_small_number(name)})"
    return is_it


def _small_number(name: str) -> str:
    return f"(type({name}) is float or type({name}) is int) and -LIMIT <= {name} <= LIMIT"


def _norm(signature: Signature, fast_path: FastPath) -> list[str]:
    """Tests that the input has the dtype that it is to have, and that weight, bias and statistics are absent, or all have that dtype, or
    are all float32 on the CPU, which has kernels for the mixture (R9)."""
    state = [p.name for p in signature.usual if p.holds == "tensor?"]
    first, *others = state
    rest = "".join(f" and ({n} is None or {n}.dtype is state)" for n in others)
    absent = " and ".join(f"{n} is None" for n in state)
    input_name = signature.usual[0].name
    if fast_path.dtype is None:  # unlisted: the input is as it is, where it is low or float32
        dtypes = " or ".join(f"its_dtype is {name}" for name in ("bfloat16", "float16"))
        wanted, of_input = "its_dtype", f"((its_dtype := {input_name}.dtype) is float32 or {dtypes})"
    else:
        wanted = _name(fast_path.dtype)
        of_input = f"{input_name}.dtype is {wanted}"
    # under vmap torch takes the others apart, where the parts do not take the mixture
    is_whole = "" if any(p.name == "normalized_shape" for p in signature.usual) else f" and not is_functorchs({input_name})"
    mixed = f"(state := {first}.dtype) is {wanted} or state is float32 and {input_name}.is_cpu{is_whole}"
    return [of_input, f"(({mixed}){rest} if {first} is not None and {first} is not NOT_GIVEN else {absent})"]
