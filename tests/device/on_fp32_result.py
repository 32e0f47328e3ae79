"""Products on the device whose result stays float32: values, gradients, the kernel that computes them, training in float16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hmp
from device_kit import BF16, F16, F32, on_cuda, tensor
from networks_kit import Net, batch, loss_of
from torch_has import TORCH

ROWS, INNER, OUTER = 96, 256, 160


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


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


def test_each_listed_op_has_a_float32_result() -> None:
    x, y = tensor(3, 32, 64), tensor(3, 64, 48, seed=1)
    calls = {
        "matmul": lambda: x @ y,
        "bmm": lambda: torch.bmm(x, y),
        "mm": lambda: torch.mm(x[0], y[0]),
        "addmm": lambda: torch.addmm(tensor(48), x[0], y[0]),
        "baddbmm": lambda: torch.baddbmm(tensor(48), x, y),
        "einsum": lambda: torch.einsum("bij,bjk->bik", x, y),
    }
    for op, call in calls.items():
        want = call()
        with hmp.casts(hmp.Policy(fp32_result={op})):
            got = call()
        assert got.dtype is F32 and 0 < apart(got, want) < 0.02, op
    assert hmp.fallbacks() == {}


class Overloads(TorchDispatchMode):
    """Notes the products that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "mm" in str(func):
            self.called.append(str(func))
        return func(*args, **(kwargs or {}))


@on_cuda("a product of low-precision matrices with a float32 result")
@pytest.mark.skipif(TORCH < (2, 8) or torch.version.hip is not None, reason="torch 2.7 has no mm(out_dtype=), and ROCm was not tried")
def test_the_kernels_of_the_low_dtype_compute_it() -> None:
    x, weight = tensor(ROWS, INNER, seed=1).requires_grad_(), tensor(OUTER, INNER, seed=2).requires_grad_()
    with hmp.casts(hmp.Policy(fp32_result={"linear"})), Overloads() as seen:
        F.linear(x, weight).sum().backward()
    assert set(seen.called) == {"aten.mm.dtype"}


def test_a_model_trains_in_float16_with_a_scaler() -> None:
    net = hmp.apply(Net(), hmp.Policy.load("autocast").replace(dtype=F16).move("linear", "fp32_result"))
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.01), torch.amp.GradScaler(tensor(1).device.type, init_scale=2.0**10)
    losses = []
    for _ in range(10):
        loss = loss_of(net, *batch())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0], losses
    print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}")
