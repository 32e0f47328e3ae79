"""What test_pretend_device.py runs in a process of its own: the device that pretend_device makes, on torch alone, without hmp."""

from __future__ import annotations

import copy
import io
import json
import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import pretend_device
import pretend_mark_checks

Tensor = torch.Tensor
Check = Callable[[], None]
CHECKS: dict[str, Check] = dict(pretend_mark_checks.CHECKS)
DEVICES = ("pretend:0", "pretend:1")


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


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


class MultiheadAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x, x, x)


# Name → the model, its input, and whether the device gives the CPU's numbers to the last bit: it has no fused attention, and cells of
# recurrent nets that add up in the order of CUDA's.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], bool]] = {
    "Linear": (lambda: nn.Linear(8, 4), sequence, True),
    "Conv1d": (lambda: nn.Conv1d(6, 4, 3), sequence, True),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3), lambda: sequence()[None], True),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(6, 4, 3), sequence, True),
    "LayerNorm": (lambda: nn.LayerNorm(8), sequence, True),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), sequence, True),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), sequence, True),
    "Embedding": (lambda: nn.Embedding(10, 4), indices, True),
    "Dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), sequence, True),
    "GRUCell": (lambda: nn.GRUCell(8, 8), lambda: sequence()[0], False),
    "LSTM": (lambda: nn.LSTM(8, 8, 2), sequence, False),
    "MultiheadAttention": (lambda: MultiheadAttention(8, 2), sequence, False),
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


def trains(name: str) -> None:
    make, x, exactly = MODELS[name]
    model, given = make(), x()
    expected = trained(copy.deepcopy(model), given)
    for device in DEVICES:
        found = trained(copy.deepcopy(model).to(device), given.to(device))
        assert all(str(t.device) == device for t in found)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other) if exactly else torch.allclose(one.cpu(), other, rtol=1e-4, atol=1e-6), (one, other)


CHECKS |= {f"trains: {name}": (lambda name=name: trains(name)) for name in MODELS}


@check
def autocast_computes_by_torchs_lists_for_accelerators() -> None:
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


@check
def a_gradient_scaler_skips_a_step_with_infinities_and_takes_the_others() -> None:
    model = nn.Linear(4, 4).to(DEVICES[0])
    before, optimizer = model.weight.detach().clone(), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("pretend", init_scale=2.0**16)
    for moves in (False, True):  # float16 holds nothing as large as the first gradient
        optimizer.zero_grad()
        with torch.autocast("pretend"):
            loss = model(torch.ones(1, 4, device=DEVICES[0])).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) is not moves
    assert scaler.get_scale() == 2.0**15


# --- devices, memory, random numbers


@check
def tensors_of_two_devices_do_not_mix() -> None:
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


@check
def backward_runs_on_a_thread_of_each_device() -> None:
    ran: list[tuple[bool, int]] = []
    for device in (*DEVICES, "cpu"):
        x = torch.ones(2, device=device, requires_grad=True)
        x.register_hook(lambda g: ran.append((threading.current_thread() is threading.main_thread(), pretend().current_device())))
        (x * 2).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]
    assert ran == [(False, 0), (False, 1), (True, 0)]


@check
def the_bytes_of_each_device_are_counted() -> None:
    module, size = pretend(), 1 << 20
    before = [module.memory_allocated(device) for device in DEVICES]
    module.reset_peak_memory_stats(1)
    tensor = torch.empty(size, dtype=torch.uint8, device=DEVICES[1])
    other = torch._lazy_clone(tensor)
    assert module.memory_allocated(1) - before[1] == size
    other.fill_(1)
    assert module.memory_allocated(1) - before[1] == 2 * size
    del tensor, other
    assert [module.memory_allocated(device) for device in DEVICES] == before
    assert module.max_memory_allocated(1) - before[1] == 2 * size


@check
def random_numbers_are_the_cpus_and_leave_its_generator_alone() -> None:
    for draw in (torch.randn, torch.rand, lambda n, **where: F.dropout(torch.ones(n, **where))):
        torch.manual_seed(3)
        on_device, later = draw(9, device=DEVICES[0]).cpu(), draw(9, device="cpu")
        torch.manual_seed(3)
        assert torch.equal(draw(9, device=DEVICES[1]).cpu(), on_device) and torch.equal(draw(9, device="cpu"), later)
    state = pretend().get_rng_state(0)
    first = torch.rand(2, device=DEVICES[0])
    pretend().set_rng_state(state, 0)
    assert torch.equal(torch.rand(2, device=DEVICES[0]), first)
    own = torch.Generator("pretend:1").manual_seed(5)
    assert torch.equal(torch.rand(2, device=DEVICES[1], generator=own).cpu(), torch.rand(2, generator=torch.Generator().manual_seed(5)))


@check
def a_checkpoint_draws_what_its_forward_drew() -> None:
    for reentrant in (True, False):
        drawn: list[Tensor] = []

        def block(x: Tensor, drawn: list[Tensor] = drawn) -> Tensor:
            drawn.append(F.dropout(x * 1, 0.5))
            return drawn[-1].square()

        x = torch.ones(64, device=DEVICES[0], requires_grad=True)
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        assert torch.equal(*drawn)


@check
def tensors_are_saved_copied_and_pinned() -> None:
    x = torch.randn(3, device=DEVICES[1])
    file = io.BytesIO()
    torch.save({"x": x}, file)
    for found in (torch.load(io.BytesIO(file.getvalue()))["x"], pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert found.device == x.device and torch.equal(found, x) and found.data_ptr() != x.data_ptr()
    assert torch.equal(torch.load(io.BytesIO(file.getvalue()), map_location="cpu")["x"], x.cpu())
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned() and not torch.ones(3).is_pinned()
    assert pinned.to(DEVICES[0], non_blocking=True).tolist() == [1.0] * 3


@check
def views_are_views() -> None:
    x = torch.arange(12.0, device=DEVICES[0]).reshape(3, 4)
    for view in (x.t(), x[1:], x.view(-1), x.unfold(1, 2, 1), x.diagonal(), x.view(torch.int32), x.expand(2, 3, 4), x.detach(), x.data):
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    z = torch.randn(3, dtype=torch.complex64, device=DEVICES[0])
    z.imag.fill_(2.0)
    assert torch.equal(z.conj().cpu(), z.cpu().conj()) and torch.equal(z.conj().imag.cpu(), torch.full((3,), -2.0))


def main() -> None:
    """Runs every check, and prints as JSON why none can run, else what failed by name."""
    torch.set_num_threads(1)
    unavailable, failed = pretend_device.unavailable(), {}
    if not unavailable:
        pretend()
        for name, function in CHECKS.items():
            torch.manual_seed(0)
            try:
                function()
            except BaseException:
                failed[name] = traceback.format_exc()
    print(json.dumps({"unavailable": unavailable, "failed": failed}), flush=True)


if __name__ == "__main__":
    main()
