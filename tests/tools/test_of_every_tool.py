"""What compare(), summary() and verify() have in common: they leave all as it was, and follow the policy that is in force or applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import hmp
from trap_kit import policy

LISTS = policy(bf16={"linear"}, fp32={"softmax"}, name="mine")
TOOLS: dict[str, Callable[..., Any]] = {
    "compare": lambda model, x, *lists: hmp.compare(model, x, *lists, loss=lambda out: out.float().square().sum()),
    "summary": hmp.summary,
    "verify": hmp.verify,
}
ODD = [name for name in ("complex32", "float4_e2m1fn_x2", "float8_e8m0fnu", "bits8") if hasattr(torch, name)]
if torch.__version__ < (2, 10) and "float4_e2m1fn_x2" in ODD:
    ODD.remove("float4_e2m1fn_x2")  # that torch cannot copy it


class Writes(nn.Module):
    """Writes its buffers, some of which share their memory, replaces one, and holds one of each odd dtype, which torch does not compare."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        whole = torch.full((8,), 1.0001)  # which bfloat16 does not hold
        self.register_buffer("first", whole[:4])
        self.register_buffer("second", whole[4:], persistent=False)
        self.register_buffer("calls", torch.zeros(1))
        for name in ODD:
            values = torch.full((8,), 7, dtype=torch.uint8)
            held = torch.zeros(8, dtype=torch.complex32) if name == "complex32" else values.view(getattr(torch, name))
            self.register_buffer(name, held)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.first.mul_(1 + 2**-12)  # by less than bfloat16 tells apart
        return self.drop(self.norm(self.layer(x.mul_(2) + y)))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("tool", TOOLS)
def test_model_batch_gradients_and_random_state_are_as_before(tool: str) -> None:
    model, both = Writes(), torch.randn(6, 4)
    model.layer(torch.ones(2, 4)).sum().backward()

    def tensors() -> dict[str, torch.Tensor]:
        batch = {"batch": both} if tool == "compare" else {}  # the others promise nothing of a batch that the model writes
        return {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}

    before = {name: (each, raw(each), each.grad, None if each.grad is None else raw(each.grad)) for name, each in tensors().items()}
    state = torch.get_rng_state()
    with hmp.casts(policy(bf16={"linear", "equal", "clone"})):  # what it keeps and puts back is not rounded by it
        found = TOOLS[tool](model, (both[:3], both[3:]))
    for name, each in tensors().items():
        tensor, value, grad, of_grad = before[name]
        assert each is tensor and raw(each) == value and each.grad is grad, name
        assert grad is None or raw(grad) == of_grad, name
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    if tool == "verify":
        assert {"clone", "equal"}.isdisjoint(row.op for row in found.rows)  # the model's ops alone


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_that_torchs_kernels_do_not_compare_are_put_back(device: str) -> None:
    class Averages(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average.mul_(1 + 2**-12)
            return super().forward(x)

    parts, model = [torch.ones(3, device=device) for _ in range(2)], Averages(3, 3)
    model.register_buffer("average", TwoTensor(*parts) if device == "cpu" else parts[0])  # with kernels of its own, as a DTensor
    hmp.verify(model.to(device), torch.randn(2, 3, device=device), LISTS)
    if device == "cpu":
        assert torch.equal(parts[0], torch.ones(3)) and torch.equal(parts[1], torch.ones(3))


@pytest.mark.parametrize("tool", TOOLS)
def test_the_policy_is_that_in_force_or_the_one_applied(tool: str) -> None:
    model, x, run = nn.Linear(8, 4), torch.randn(6, 8), TOOLS[tool]

    def name(found: Any) -> str:
        return found.policies[0]["name"] if tool == "verify" else found.policy

    for around in (lambda: hmp.casts(LISTS), lambda: hmp.convert(policy=LISTS)):
        with around():
            assert name(run(model, x)) == "mine"
    hmp.apply(model, LISTS)
    assert name(run(model, x)) == "mine"
    with pytest.raises(hmp.HmpError, match=r"'mine' is applied to the model .* 'test'; call hmp\.remove\(model\)"):
        run(model, x, policy(bf16={"linear"}))
    with pytest.raises(hmp.HmpError, match="got builtin_function_or_method"):
        run(torch.relu, x)


def test_verify_and_compare_say_what_loss_they_take_of_a_complex_output() -> None:
    class Fourier(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(super().forward(x))

    model, x = Fourier(4, 4), torch.randn(2, 4)
    with pytest.raises(hmp.HmpError, match=r"the sum of the model's output: expected a real tensor with one element, got complex64\[\]"):
        hmp.verify(model, x, "autocast")
    with pytest.raises(hmp.HmpError, match=r"loss\(output\): expected a real"):
        hmp.compare(model, x, "autocast", loss=torch.Tensor.sum)
    hmp.verify(model, x, "autocast", loss=lambda output: output.abs().sum())
