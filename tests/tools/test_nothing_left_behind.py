"""Every tool leaves torch, the model and the random state as plain torch would, also where forward writes weights."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hmp


class Writes(nn.Module):
    """Its forward writes an embedding, the vectors of a spectral norm, running averages, a counter, a list and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, max_norm=0.5)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.batch_norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
        self.frozen = nn.LayerNorm(8).eval()
        self.steps, self.seen = 0, [torch.zeros(1)]
        self.head.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.seen[0] += 1
        self.seen.append(torch.ones(1))
        self.drop.train(not self.drop.training)
        self.drop.register_forward_hook(lambda *_: None)
        return self.head(self.drop(self.batch_norm(self.frozen(self.normed(self.table(x))))))


X = torch.arange(8)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().sum()


def squared(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().sum()


# Each runs the model, and puts it back.
RUNS: dict[str, Callable[[nn.Module], Any]] = {
    "summary": lambda model: hmp.summary(model, X, "torch-cpu"),
    "verify": lambda model: hmp.verify(model, X, "torch-cpu", loss=squared),
    "compare": lambda model: hmp.compare(model, X, "torch-cpu", loss=squared),
    "explain": lambda model: hmp.explain("linear", "torch-cpu"),
    "benchmark": lambda model: hmp.benchmark(lambda: loss(model, X).backward(), ["float32", "torch-cpu"], model=model, rounds=3, steps=1),
    "tune": lambda model: hmp.tune(model, [X], loss=loss, max_trials=3, objective="memory", steps=1, progress=False),
}


def contents(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"{path} mode"] = module.training
        for name, table in vars(module).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                found[f"{path} {name}"] = list(table)
    found["counts"] = model.steps, len(model.seen), float(model.seen[0])
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = id(tensor), tensor.detach().numpy().tobytes(), tensor.grad is None, tensor.requires_grad
    return found


def draws() -> tuple[Any, ...]:
    return random.getstate(), bytes(torch.get_rng_state().numpy())


@pytest.mark.parametrize("tool", RUNS)
def test_torch_weights_buffers_modes_hooks_and_random_state_are_as_before(
    tool: str, unpatched: None, torch_differences: Callable[[], list[str]]
) -> None:
    model = Writes()
    before, drawn = contents(model), draws()
    RUNS[tool](model)
    changed = [name for name, value in contents(model).items() if value != before.get(name)]
    assert not changed and draws() == drawn
    assert not torch_differences()


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
