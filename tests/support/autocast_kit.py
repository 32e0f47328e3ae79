"""What the tests of R17 share: two policies that tell where hmp casts, and torch.autocast's real state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trap_kit import policy

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# the device of the tests' tensors: the CPU, unless device_tensors.py chose another
HERE = torch.get_default_device().type
# mul is on no list of torch.autocast: its dtype tells what hmp does, whatever torch.autocast does
LOW = policy(bf16=["mul"], name="low")
HALF = policy(bf16=["mul"], dtype=F16, name="half")
X = torch.ones(3, 3)


def muls() -> torch.dtype:
    """The dtype in which hmp runs mul here."""
    return torch.mul(X, X).dtype


def real_state() -> tuple[object, ...]:
    """torch.autocast's real state in this thread: hmp does not patch torch._C."""
    devices = (HERE, "xpu" if HERE == "cuda" else "cuda")
    states = [(torch._C.is_autocast_enabled(each), torch._C.get_autocast_dtype(each)) for each in devices]
    return (*states, torch._C.is_autocast_cache_enabled())


OFF = real_state()


def is_real() -> bool:
    """Whether torch.autocast is really enabled in this thread, for any device."""
    return torch._C._is_any_autocast_enabled()


def needs_autocasts_lstm() -> None:
    """Skips where torch.autocast itself has no LSTM."""
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        _needs("LSTM in bfloat16", lambda: torch.nn.LSTM(8, 8)(torch.ones(1, 2, 8)))


def needs_scaled_product() -> None:
    """Skips where torch itself has no product of scaled float8 tensors."""
    one, eights = torch.ones(()), torch.ones(16, 16).to(torch.float8_e4m3fn)
    _needs("product in float8", lambda: torch._scaled_mm(eights, eights.t(), scale_a=one, scale_b=one, out_dtype=BF16))


def _needs(what: str, call: Callable[[], object]) -> None:
    """torch asks oneDNN by what the processor can, which refuses where ONEDNN_MAX_CPU_ISA says less."""
    try:
        call()
    except RuntimeError as error:
        if "primitive" not in str(error):
            raise
        pytest.skip(f"torch runs no {what} with these kernels: {error}")
