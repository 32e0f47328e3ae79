"""The pretend device is one as torch knows them, asked of torch alone: it trains as the CPU does, and a read keeps a mark on its memory.

What is asked of every device, GradScaler and a checkpoint's random numbers among it, the other parts ask of this one too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pretend_device
from device_kit import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "pretend", reason="the pretend device's own")
Tensor = torch.Tensor
DEVICES = ("pretend:0", "pretend:1")


def pretend() -> Any:
    """The module of the device."""
    return pretend_device.set_up()


def refused(call: Callable[[], Any], words: str) -> None:
    try:
        call()
    except (RuntimeError, TypeError) as error:
        assert words in str(error), error
    else:
        raise AssertionError("it ran")


# --- training, as on the CPU


def sequence() -> Tensor:
    return torch.randn(4, 6, 8)


def indices() -> Tensor:
    return torch.randint(0, 10, (3, 5))


class SelfAttention(nn.Module):
    """torch's attention, which the CPU fuses and the device does not."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


# Name → the model, its input, and whether the device gives the CPU's numbers to the last bit: it has no fused attention, and cells of
# recurrent nets that add up in the order of CUDA's.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], bool]] = {
    "Conv1d": (lambda: nn.Conv1d(6, 4, 3), sequence, True),
    "LayerNorm": (lambda: nn.LayerNorm(8), sequence, True),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), sequence, True),
    "Embedding": (lambda: nn.Embedding(10, 4), indices, True),
    "Dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), sequence, True),
    "LSTM": (lambda: nn.LSTM(8, 8, 2), sequence, False),
    "scaled_dot_product_attention": (SelfAttention, sequence, False),
}


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The losses of three steps, the gradients, the parameters and the buffers."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(3):
        optimizer.zero_grad()
        result = model(x)
        loss = (result[0] if isinstance(result, tuple) else result).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach() for t in (*losses, *gradients, *model.parameters(), *model.buffers())]


def test_models_train_as_on_the_cpu() -> None:
    for name, (make, x, exactly) in MODELS.items():
        torch.manual_seed(0)
        model, given = make(), x()
        expected = trained(copy.deepcopy(model), given)
        for device in DEVICES:
            found = trained(copy.deepcopy(model).to(device), given.to(device))
            assert all(str(t.device) == device for t in found), name
            for one, other in zip(found, expected, strict=True):
                near = torch.equal(one.cpu(), other) if exactly else torch.allclose(one.cpu(), other, rtol=1e-4, atol=1e-6)
                assert near, (name, one, other)


def test_autocast_computes_by_torchs_lists_for_accelerators() -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    results = []
    for device in ("cpu", DEVICES[0]):
        here = copy.deepcopy(model).to(device)
        with torch.autocast(device.split(":")[0], dtype=torch.bfloat16):
            product = here(x.to(device))
            wide = F.softmax(product, -1)  # on CUDA's list of what computes in float32, and not on the CPU's
        product.float().sum().backward()
        results.append((product.cpu(), here.weight.grad.cpu()))
        assert product.dtype is torch.bfloat16 and wide.dtype is (torch.bfloat16 if device == "cpu" else torch.float32)
    assert all(map(torch.equal, *results))
    assert not torch.is_autocast_enabled("pretend") and torch.get_autocast_dtype("pretend") is torch.float16


# --- devices


def test_tensors_of_two_devices_do_not_mix() -> None:
    here, there, host = (torch.ones(2, 2, device=device) for device in (*DEVICES, "cpu"))
    for other in (there, host):
        for op in (torch.mm, torch.add, torch.dot, torch.cdist):
            refused(lambda op=op, other=other: op(here, other), "Expected all tensors to be on the same device")
    refused(here.numpy, "convert pretend:0")
    assert here.add(torch.tensor(2.0)).tolist() == [[3.0, 3.0]] * 2 and here.to(there.device).device == there.device
    refused(lambda: torch.ones(1, device="pretend:2"), "devices 0 to 1")
    with torch.device(DEVICES[1]):
        assert torch.ones(1).device == there.device
    with pretend().device(1):
        assert torch.ones(1, device="pretend").device == there.device
    assert pretend().current_device() == 0


def test_backward_runs_on_a_thread_of_each_device() -> None:
    ran: list[tuple[bool, int]] = []
    for device in (*DEVICES, "cpu"):
        x = torch.ones(2, device=device, requires_grad=True)
        x.register_hook(lambda g: ran.append((threading.current_thread() is threading.main_thread(), pretend().current_device())))
        (x * 2).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]
    assert ran == [(False, 0), (False, 1), (True, 0)]
