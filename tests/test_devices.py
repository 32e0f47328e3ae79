"""The rules look at dtypes, never at device names: they hold on devices whose kernels are not here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import hmp


def dtypes_on(device: str) -> dict[str, torch.dtype]:
    x = torch.empty(2, 3, 8, 8, device=device)
    w = torch.empty(4, 3, 3, 3, device=device)
    rows = torch.empty(5, 8, device=device)
    square = torch.empty(8, 8, device=device)
    low, batch = square.to(torch.bfloat16), torch.empty(3, 8, 8, device=device)
    return {
        "conv2d": F.conv2d(x, w).dtype,
        "linear": F.linear(rows, square).dtype,
        "matmul": (rows @ square).dtype,
        "mul": (rows * 2.0).dtype,
        "relu": F.relu(rows).dtype,
        "softmax": F.softmax(low, dim=-1).dtype,
        "truediv": (low / 3).dtype,
        "add": (low + square).dtype,
        "baddbmm": torch.baddbmm(batch, low.expand(3, 8, 8), batch).dtype,
        "mul_": square.clone().mul_(low).dtype,
        "index_put": low.clone().index_put((torch.zeros(2, dtype=torch.long, device=device),), torch.empty(8, device=device)).dtype,
        "float64": (square.double() @ square.double()).dtype,
    }


EXPECTED = {
    "conv2d": torch.bfloat16,
    "linear": torch.bfloat16,
    "matmul": torch.bfloat16,
    "mul": torch.bfloat16,
    "relu": torch.bfloat16,
    "softmax": torch.float32,
    "truediv": torch.float32,
    "add": torch.float32,
    "baddbmm": torch.float32,
    "mul_": torch.float32,
    "index_put": torch.bfloat16,
    "float64": torch.float64,
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rules_hold_on_real_tensors(device: str) -> None:
    with hmp.casts("habana"):
        assert dtypes_on(device) == EXPECTED


def test_rules_hold_on_cuda_tensors_without_a_gpu() -> None:
    # fake tensors carry the device and compute dtypes with the kernels of that device, without hardware
    with FakeTensorMode(allow_non_fake_inputs=True), hmp.casts("habana"):
        assert dtypes_on("cuda") == EXPECTED


def test_norm_weights_follow_the_input_where_the_device_has_no_mixed_kernel() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), hmp.casts("habana"):
        x, w = torch.empty(2, 8, device="cuda"), torch.empty(8, device="cuda")
        assert F.layer_norm(x, (8,), w, w).dtype is torch.bfloat16
