"""Products on the device whose result stays float32: values, gradients, the kernel that computes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import hmp
from device_kit import BF16, F16, F32, apart, on_cuda, tensor
from dispatch_kit import Trace
from torch_has import TORCH

ROWS, INNER, OUTER = 96, 256, 160


@pytest.mark.parametrize("low", [BF16, F16])
def test_result_and_gradients_are_sums_in_float32_of_rounded_numbers(low: torch.dtype) -> None:
    """Beside float64 by hand: rounded once more they would be 2**-9 apart, 2**-12 in float16."""
    x, weight, gradient = tensor(ROWS, INNER, seed=1), tensor(OUTER, INNER, seed=2), tensor(ROWS, OUTER, seed=3)
    exact = [each.detach().to(low).double() for each in (x, weight, gradient)]
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    with hmp.casts(hmp.Policy(fp32_result={"linear"}, dtype=low)):
        y = F.linear(*leaves)
    y.backward(gradient)
    wanted = [exact[0] @ exact[1].T, exact[2] @ exact[1], exact[2].T @ exact[0]]
    results = [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    errors = [apart(got, want) for got, want in zip(results, wanted, strict=True)]
    assert all(each.dtype is F32 for each in results) and max(errors) < 2**-16, errors
    print(f"relative errors {', '.join(f'{error:.1e}' for error in errors)}")


@on_cuda("a product of low-precision matrices with a float32 result")
@pytest.mark.skipif(TORCH < (2, 8) or torch.version.hip is not None, reason="torch 2.7 has no mm(out_dtype=), and ROCm was not tried")
def test_the_kernels_of_the_low_dtype_compute_it() -> None:
    x, weight = tensor(ROWS, INNER, seed=1).requires_grad_(), tensor(OUTER, INNER, seed=2).requires_grad_()
    with hmp.casts(hmp.Policy(fp32_result={"linear"})), Trace() as seen:
        F.linear(x, weight).sum().backward()
    assert set(seen.products()) == {"aten.mm.dtype"}
