"""What the tools have in common: each leaves torch, the model and the random state as plain torch would, also where forward writes weights,
and follows the policy that is in force or applied.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import hmp
from trap_kit import policy

LISTS = policy(bf16={"linear"}, fp32={"softmax"}, name="mine")
# with what a tool itself may call to keep a tensor and to compare it
OF_TOOLS = policy(bf16={"linear", "equal", "clone"})
ODD = [name for name in ("complex32", "float4_e2m1fn_x2", "float8_e8m0fnu", "bits8") if hasattr(torch, name)]
if torch.__version__ < (2, 10) and "float4_e2m1fn_x2" in ODD:
    ODD.remove("float4_e2m1fn_x2")  # that torch cannot copy it


class Writes(nn.Module):
    """Its forward writes an embedding, the vectors of a spectral norm, running averages, a counter, a list, a hook, an input and buffers.

    Of the buffers two share their memory, one is replaced, and one of each odd dtype is there, which torch does not compare.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, max_norm=0.5)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.batch_norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
        self.frozen = nn.LayerNorm(8).eval()
        self.steps, self.seen = 0, [torch.zeros(1)]
        self.head.register_forward_hook(lambda module, args, output: output * 2)
        whole = torch.full((8,), 1.0001)  # which bfloat16 does not hold
        self.register_buffer("first", whole[:4])
        self.register_buffer("second", whole[4:], persistent=False)
        self.register_buffer("calls", torch.zeros(1))
        for name in ODD:
            values = torch.full((8,), 7, dtype=torch.uint8)
            held = torch.zeros(8, dtype=torch.complex32) if name == "complex32" else values.view(getattr(torch, name))
            self.register_buffer(name, held)

    def forward(self, x: torch.Tensor, written: torch.Tensor | None = None) -> torch.Tensor:
        self.steps += 1
        self.seen[0] += 1
        self.seen.append(torch.ones(1))
        self.calls = self.calls + 1
        self.first.mul_(1 + 2**-12)  # by less than bfloat16 tells apart
        if written is not None:
            written.mul_(2)
        self.drop.train(not self.drop.training)
        self.drop.register_forward_hook(lambda *_: None)
        return self.head(self.drop(self.batch_norm(self.frozen(self.normed(self.table(x))))))


X, WRITTEN = torch.arange(8), torch.randn(4)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().sum()


TOOLS: dict[str, Callable[..., Any]] = {
    "compare": lambda model, x, *lists: hmp.compare(model, x, *lists, loss=lambda out: out.float().square().sum()),
    "summary": hmp.summary,
    "verify": hmp.verify,
}
# Each runs the model, and puts it back; compare() alone promises that of a batch that the model writes.
RUNS: dict[str, Callable[..., Any]] = {
    "compare": lambda model, *lists: TOOLS["compare"](model, (X, WRITTEN), *lists),
    "summary": lambda model, *lists: hmp.summary(model, (X, WRITTEN.clone()), *lists),
    "verify": lambda model, *lists: hmp.verify(model, (X, WRITTEN.clone()), *lists),
    "explain": lambda model, *lists: hmp.explain("linear", *lists),
    "benchmark": lambda model, *_: hmp.benchmark(lambda: loss(model, X).backward(), ["float32", "habana"], model=model, rounds=3, steps=1),
    "tune": lambda model, *_: hmp.tune(model, [X], loss=loss, max_trials=3, objective="memory", steps=1, progress=False),
}


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def contents(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {"batch": raw(WRITTEN), "counts": (model.steps, len(model.seen), float(model.seen[0]))}
    for path, module in model.named_modules():
        found[f"{path} mode"] = module.training
        for name, table in vars(module).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                found[f"{path} {name}"] = list(table)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = id(tensor), raw(tensor), tensor.requires_grad
        found[f"gradient of {name}"] = None if tensor.grad is None else (id(tensor.grad), raw(tensor.grad))
    return found


def draws() -> tuple[Any, ...]:
    return random.getstate(), bytes(torch.get_rng_state().numpy())


@pytest.mark.parametrize("tool", RUNS)
def test_torch_weights_buffers_modes_hooks_gradients_and_random_state_are_as_before(
    tool: str, unpatched: None, torch_differences: Callable[[], list[str]]
) -> None:
    model = Writes()
    if tool != "tune":  # which promises nothing of gradients that were there
        loss(model, X).backward()
    before, drawn = contents(model), draws()

    def assert_as_before() -> None:
        assert [name for name, value in contents(model).items() if value != before.get(name)] == [] and draws() == drawn

    RUNS[tool](model, LISTS)
    assert_as_before()
    assert not torch_differences()
    with hmp.casts(OF_TOOLS):  # what it keeps and puts back is not rounded by it
        found = RUNS[tool](model)
    assert_as_before()
    if tool == "verify":
        own = {(row.op, row.module.partition(".")[0]) for row in found.rows if row.op in ("clone", "equal")}
        assert own == {("clone", "normed")}  # the spectral norm's, and none of the tool's


@pytest.mark.parametrize("tool", ["record", "detect_nonfinite", "capture"])
def test_what_runs_in_a_context_leaves_what_a_plain_run_leaves(
    tool: str, tmp_path: Path, unpatched: None, torch_differences: Callable[[], list[str]]
) -> None:
    plain, model = Writes(), Writes()
    model.load_state_dict(copy.deepcopy(plain.state_dict()))
    contexts = {"record": hmp.record, "detect_nonfinite": hmp.detect_nonfinite, "capture": lambda: hmp.capture(tmp_path / "a", model)}
    torch.manual_seed(1)
    loss(plain, X).backward()
    drawn = draws()
    torch.manual_seed(1)
    with contexts[tool]():
        loss(model, X).backward()
    assert draws() == drawn and not torch_differences()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other) and torch.equal(one.grad, other.grad), name
    one, other = contents(plain), contents(model)
    assert {name: one[name] for name in one if name.endswith("mode")} == {name: other[name] for name in other if name.endswith("mode")}
    # hooks have numbers of their own
    counts = [{name: len(found[name]) for name in found if isinstance(found[name], list)} for found in (one, other)]
    assert counts[0] == counts[1]


def test_torch_stays_patched_for_a_policy_that_is_used() -> None:
    model = hmp.apply(nn.Linear(8, 4), "torch-cpu")
    hmp.summary(model, torch.randn(2, 8))
    assert model(torch.randn(2, 8)).dtype is torch.bfloat16
    with hmp.casts("torch-cpu"):
        hmp.verify(nn.Linear(8, 4), torch.randn(2, 8))
        assert nn.Linear(8, 4)(torch.randn(2, 8)).dtype is torch.bfloat16


@pytest.mark.parametrize("tool", [hmp.summary, hmp.verify])
def test_weights_without_a_shape_cannot_be_put_back_and_are_refused(tool: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(hmp.HmpError, match="lazy modules; call it with a batch first"):
        tool(model, torch.randn(2, 3), "torch-cpu")
    assert isinstance(model[0].weight, nn.UninitializedParameter)
    model(torch.randn(2, 3))
    tool(model, torch.randn(2, 3), "torch-cpu")


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
