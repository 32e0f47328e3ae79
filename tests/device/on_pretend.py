"""The pretend device is one as torch knows them, asked of torch alone: its lists, two devices that do not mix, threads for backward."""

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
