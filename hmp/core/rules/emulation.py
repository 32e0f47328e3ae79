"""Matrix products, convolutions and recurrent ops compute in float32 where the CPU has no instructions for their low-precision dtype.

The result and the gradients are those of `op(x.float(), ...).to(low)` for inputs `x` of the low-precision dtype: a low-precision product,
summed in float32 and rounded once, as accelerators compute it. For backward the op saves its inputs in float32.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import HmpError
from .. import casting, copies, torch_private
from ..active.autocast import is_enabled as _is_autocast_enabled
from ..casting import Caster, Tensor, dtype_name, each_tensor
from ..log import log, should_log
from ..observe import here
from ..ops import table
from . import kernels
from .op import Op, OpUnderRule, castable_inputs

# --- which dtypes, and who says so ----------------------------------------------------------------------------------------

CHOICES = ("auto", "native", "float32")
_VARIABLE = "HMP_LOW_KERNELS"

_chosen: str | None = None  # None: the environment says


def choice() -> str:
    """Return "auto", "native" or "float32": the last one that was set, else that of HMP_LOW_KERNELS, else "auto".

    Raises:
        HmpError: HMP_LOW_KERNELS has another value.
    """
    return _chosen or _checked(os.environ.get(_VARIABLE) or "auto", _VARIABLE)


def choose(new: str) -> str:
    """Set the choice for the process. Return the one before."""
    global _chosen
    before, _chosen = choice(), _checked(new, "set_low_kernels()")
    return before


def _checked(value: object, where: str) -> str:
    if value not in CHOICES:
        raise HmpError(f"{where}: expected 'auto', 'native' or 'float32', got {value!r}")
    return str(value)


def computed_in_float32() -> frozenset[torch.dtype]:
    """Return the low-precision dtypes in which the CPU's matrix products, convolutions and recurrent ops compute in float32."""
    chosen = choice()
    if chosen == "native":
        return frozenset()
    return frozenset(dtype for dtype in casting.LOW if chosen == "float32" or not _HAS_INSTRUCTIONS[dtype])


def _flag(of_mkldnn: bool | None, of_arm: str) -> bool:
    is_arm = platform.machine() in ("arm64", "aarch64")
    return (is_arm and bool(torch_private.cpu_capabilities().get(of_arm))) if of_mkldnn is None else of_mkldnn


# Whether the processor has instructions for products in a dtype. A flag decides and no clock, so that results do not depend on what else
# the machine does: the flag by which torch itself chooses its kernel, or where this build of torch has none (macOS) the processor's own.
# For bfloat16 torch's flag is true for any AVX512; where that has neither avx512_bf16 nor AMX, oneDNN widens inside, and a step takes 1.2
# to 1.9 times what float32 products of rounded inputs take. Asked once: compiled code would note the question.
_HAS_INSTRUCTIONS = {
    torch.bfloat16: _flag(torch_private.mkldnn_supports("bf16"), "bf16") and torch_private.x86_multiplies_bfloat16() is not False,
    torch.float16: _flag(torch_private.mkldnn_supports("fp16"), "fp16_arith"),
}


def why(dtype: torch.dtype) -> str:
    """Return why products in that dtype compute in float32, as the end of a sentence."""
    if _HAS_INSTRUCTIONS[dtype]:
        return f"{_VARIABLE} or hmp.low_kernels.set_low_kernels() asks for it"
    return f"this processor has no {dtype_name(dtype)} instructions"


# --- the wrappers ---------------------------------------------------------------------------------------------------------

_compiling = torch.compiler.is_dynamo_compiling
# Of others torch has few low-precision kernels, and where it has none the result stays float32.
_LAYOUTS = frozenset({torch.strided, torch.sparse_coo, torch.jagged})
# Of the ops in which torch.autocast decides, those that are replaced: the others are rare, and left to it and its slow kernels.
_REPLACED = table.RECURRENT | {"einsum"}


def _applies(ruled: OpUnderRule) -> bool:
    """Return True if calls of the op on the CPU may have to compute in float32."""
    slow = computed_in_float32()
    dtype = ruled.low_dtype if ruled.rule.runs_autocast else ruled.dtype
    return ruled.facts.needs_instructions and (bool(slow) if dtype is None else dtype in slow)


def in_float32(op: Op, ruled: OpUnderRule, *, as_autocast: bool = False) -> Op:
    """Return a function that calls `op` in float32 for CPU tensors of a low-precision dtype without instructions, and unchanged for others.

    `as_autocast`: what torch.autocast leaves in float32 stays so, a recurrent op's state next to its low-precision weights, and the result.
    """
    if not _applies(ruled):
        return op
    stays_wide = as_autocast and ruled.op in table.WIDE_UNDER_AUTOCAST
    low_dtype_of = functools.partial(_low_dtype_of, ruled.op, computed_in_float32(), torch.float32 if stays_wide else None)

    def computed(*args: Any, **kwargs: Any) -> Any:
        low_dtype = low_dtype_of(args, kwargs)
        if low_dtype is None:
            return op(*args, **kwargs)
        if not _compiling():
            _log(low_dtype)
            if here.call is not None:
                here.call.in_float32 = True
        wide_args, wide_kwargs = casting.cast_call(args, kwargs, torch.float32, copies.widened)
        result = op(*wide_args, **wide_kwargs)
        return result if stays_wide else casting.cast_within(result, low_dtype, casting.cast)

    return kernels.or_uncast(computed, op)


def _low_dtype_of(
    op: str, slow: frozenset[torch.dtype], beside: torch.dtype | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.dtype | None:
    """Return the dtype, one of `slow`, of a call's CPU tensors, of which some may be in `beside`; None for a call that is left to torch.

    Those are calls with another floating dtype among the tensors, with `out=` or `dtype=`, in an autocast context of the user's, and an
    einsum of one tensor, which multiplies nothing and may be a view.
    """
    values = (*args, *kwargs.values())
    if kwargs.get("out") is not None or torch.dtype in map(type, values) or _is_autocast_enabled("cpu"):
        return None
    found, count = None, 0
    for tensor in each_tensor(values):
        if casting.left_to_torch(tensor):
            return None
        dtype = tensor.dtype
        count += 1
        if dtype is found or dtype is beside or dtype not in casting.CASTABLE:
            continue
        if found is not None or dtype not in slow or not tensor.is_cpu or tensor.layout not in _LAYOUTS:
            return None
        found = dtype
    return None if op == "einsum" and count == 1 else found


def replaces_autocast(ruled: OpUnderRule, tensors: Sequence[Tensor]) -> bool:
    """Return True if hmp computes a call in float32 and enables no torch.autocast for it: on the CPU, outside of the user's contexts."""
    return ruled.op in _REPLACED and bool(tensors) and tensors[0].is_cpu and not _is_autocast_enabled("cpu") and _applies(ruled)


def under_autocast(by_autocast: Op, op: Op, ruled: OpUnderRule, caster: Caster) -> Op:
    """Return a function for an op that torch.autocast decides elsewhere: on the CPU its inputs are rounded and `op` computes in float32.

    A recurrent op's state stays as it is where torch.autocast leaves it so.
    """
    if ruled.op not in _REPLACED or not _applies(ruled):
        return by_autocast
    keep: frozenset[int | str] = frozenset({1, "hx"} if ruled.op in table.WIDE_UNDER_AUTOCAST else ())

    def rounded(*args: Any, **kwargs: Any) -> Any:
        if not _is_replaced(ruled, args) or not replaces_autocast(ruled, castable_inputs(args, kwargs, ruled) or []):
            return by_autocast(*args, **kwargs)
        low_args, low_kwargs = casting.cast_call(args, kwargs, ruled.low_dtype, caster, keep)
        return op(*low_args, **low_kwargs)

    return rounded


def _is_replaced(ruled: OpUnderRule, args: tuple[Any, ...]) -> bool:
    """Return False for a call that torch.autocast does not compute as a low-precision product of all its inputs.

    Those are an einsum that sums over no label of two operands, and recurrent layers of a packed batch, whose weights come fourth.
    """
    if ruled.op != "einsum":
        return len(args) < 4 or not isinstance(args[3], (list, tuple))
    if not isinstance(args[0], str):
        return True
    given, arrow, result = args[0].replace(" ", "").partition("->")
    operands = [set(operand) for operand in given.split(",")]
    several = {label for i, operand in enumerate(operands) for label in operand if any(label in other for other in operands[i + 1 :])}
    return bool(several - {"."} - set(result if arrow else ""))


@functools.cache
def _log(low_dtype: torch.dtype) -> None:
    """Say once in a process that products compute in float32, and how to have torch's kernels."""
    if should_log():
        log.info(
            "matrix multiplications, convolutions and recurrent ops in %s compute in float32 on the CPU, on rounded inputs: %s; "
            "to use torch's kernels set HMP_LOW_KERNELS=native or call hmp.low_kernels.set_low_kernels('native') (see rule R11)",
            dtype_name(low_dtype), why(low_dtype),
        )  # fmt: skip
