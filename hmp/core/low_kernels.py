"""Low-precision dtypes that the CPU computes in float32, for want of the processor's instructions."""

from __future__ import annotations

import os
import platform

import torch

from ..errors import HmpError
from .torch_private import cpu_capabilities, mkldnn_supports, x86_multiplies_bfloat16

LOW = (torch.bfloat16, torch.float16)
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
    checked = _checked(new, "set_low_kernels()")
    before = choice()
    _chosen = checked
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
    return frozenset(dtype for dtype in LOW if chosen == "float32" or not has_instructions(dtype))


def has_instructions(dtype: torch.dtype) -> bool:
    """Return True if the processor has instructions for products in that low-precision dtype.

    A flag decides and no clock, so that results do not depend on what else the machine does: the flag by which torch itself chooses its
    kernel, or where this build of torch has none (macOS) the processor's own. For bfloat16 torch's flag is true for any AVX512; where that
    has neither avx512_bf16 nor AMX, oneDNN widens inside, and a step takes 1.2 to 1.9 times what float32 products of rounded inputs take.
    """
    return _HAS[dtype]


def _flag(of_mkldnn: bool | None, of_arm: str) -> bool:
    if of_mkldnn is None:
        return platform.machine() in ("arm64", "aarch64") and bool(cpu_capabilities().get(of_arm))
    return of_mkldnn


# Asked once: compiled code would note the question.
_HAS = {
    torch.bfloat16: _flag(mkldnn_supports("bf16"), "bf16") and x86_multiplies_bfloat16() is not False,
    torch.float16: _flag(mkldnn_supports("fp16"), "fp16_arith"),
}


def why(dtype: torch.dtype) -> str:
    """Return why products in that dtype compute in float32, as the end of a sentence."""
    name = str(dtype).removeprefix("torch.")
    if has_instructions(dtype):
        return f"{_VARIABLE} or hmp.set_low_kernels() asks for it"
    return f"this processor has no {name} instructions"
