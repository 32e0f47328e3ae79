"""Products in FP8 on the device: its kernels beside the emulation, and training under the preset."""

from __future__ import annotations

import unittest.mock

import pytest
import torch
import torch.nn.functional as F

import hmp
from device_kit import BF16, DEVICE, Net, apart, batch, loss_of, same, tensor
from hmp.fp8 import fused_kernels, is_real
from hmp.fp8.quantization import RECIPES, Layout, quantise

ROWS, INNER, OUTER = 96, 256, 160


def fp8(recipe: str = "tensorwise", kernel: str = "auto") -> hmp.Policy:
    return hmp.Policy(fp8={"linear", "bmm"}, fp8_recipe=recipe, fp8_kernel=kernel)


def product(policy: hmp.Policy, spread: int = 0) -> list[torch.Tensor]:
    """A linear layer's result and the gradients of its input and weight; values over 2 * `spread` powers of two more."""
    x, weight = tensor(ROWS, INNER, seed=1), tensor(OUTER, INNER, seed=2)
    if spread:
        x = x * 2.0 ** torch.randint(-spread, spread, (ROWS, 1), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    with hmp.casts(policy):
        y = F.linear(*leaves)
    y.backward(tensor(ROWS, OUTER, seed=4, dtype=BF16))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_what_is_compiled_gives_the_bits_of_the_ops_one_by_one() -> None:
    """A tensor in FP8, of every layout, with what is not finite in it, of an inner size that is no multiple of anything, and transposed."""
    large = tensor(1000, 777, seed=7, dtype=BF16) * 100
    large[3, 5], large[70, 9] = float("inf"), float("nan")
    tensors = [large, large.float(), large.t(), torch.zeros(64, 64, device=DEVICE)]
    layouts = [
        Layout(form, scaling, False, axis)
        for form in (torch.float8_e4m3fn, torch.float8_e5m2)
        for scaling, axis in (("tensor", -1), ("row", -1), ("row", -2))
    ]
    is_fused, compared = fused_kernels.fuses(large), 0
    for layout in layouts:
        for each in tensors:
            got = quantise(each, layout)
            with unittest.mock.patch.object(fused_kernels, "fuses", return_value=False):
                want = quantise(each, layout)
                rows = fused_kernels.row_major(want.data.t())
            same(got.data.view(torch.uint8), want.data.view(torch.uint8), f"{layout}: data")
            same(got.scale, want.scale, f"{layout}: scale")
            same(fused_kernels.row_major(want.data.t()).view(torch.uint8), rows.view(torch.uint8), f"{layout}: rows")
            compared += 1
    if not is_fused:
        pytest.skip(f"nothing is compiled on {DEVICE}")
    print(f"{compared} tensors")


def test_the_devices_kernels_give_what_the_emulation_gives() -> None:
    """Result and both gradients, under each recipe that the device has a kernel for."""
    real = [name for name, recipe in RECIPES.items() if is_real("auto", torch.device(DEVICE), recipe)]
    if not real:
        pytest.skip(f"{DEVICE} has no FP8 arithmetic here: its products are emulated")
    said = []
    for recipe in real:
        for spread in (0, 8):
            pairs = zip(product(fp8(recipe), spread), product(fp8(recipe, "emulate"), spread), strict=True)
            errors = [apart(got, want) for got, want in pairs]
            assert max(errors) < 2**-7, (recipe, spread, errors)
            said.append(f"{recipe} {max(errors):.1e}")
    print("largest relative differences: " + ", ".join(said))


def train(policy: str | hmp.Policy) -> list[float]:
    net = hmp.apply(Net(), policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        loss = loss_of(net, *batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_model_trains_under_the_preset_as_under_bfloat16() -> None:
    low, eight = train("autocast"), train("fp8")
    assert all(torch.tensor(eight).isfinite()) and eight[-1] < eight[0], eight
    assert abs(eight[-1] - low[-1]) < 0.1 * (low[0] - low[-1]), (low, eight)
    print(f"losses {low[0]:.4f} to {low[-1]:.4f} under autocast, to {eight[-1]:.4f} in FP8")
