"""transformers' accelerate with hmp: its training loop under convert(), with and without its own mixed precision."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hmp
from training_by_hand import assert_same_weights, batches, net, sgd, train_by_hand

accelerate = pytest.importorskip("accelerate")
from accelerate.utils import AutocastKwargs  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32


pytestmark = pytest.mark.usefixtures("forget_accelerator")


def train(
    precision: str = "no", around_prepare: Callable[[], Any] = lambda: None, model: nn.Module | None = None, **kwargs: Any
) -> tuple[list[float], nn.Module]:
    """The losses and the model after two epochs of accelerate's loop."""
    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True, **kwargs)
    network = net() if model is None else model
    optimizer = sgd(network.parameters())
    prepared, optimizer, data = accelerator.prepare(network, optimizer, batches())
    around_prepare()
    losses = []
    for _ in range(2):
        for x, y in data:
            with accelerator.accumulate(prepared):
                loss = F.mse_loss(prepared(x).float(), y)
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    return losses, network


def assert_same(found: tuple[list[float], nn.Module], wanted: tuple[list[float], nn.Module]) -> None:
    assert found[0] == wanted[0]
    assert_same_weights(found[1], wanted[1])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("late", [False, True], ids=["converted before", "converted after prepare"])
def test_its_loop_under_convert_trains_as_explicit_casts_do(accumulate: int, late: bool):
    if not late:
        hmp.convert()
    found = train(around_prepare=hmp.convert if late else lambda: None, gradient_accumulation_steps=accumulate)
    hmp.revert()
    assert_same(found, train_by_hand(lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05), accumulate))
    assert found[0] != train(gradient_accumulation_steps=accumulate)[0], "the precision makes no difference here"


def test_with_its_bf16_a_policy_of_torchs_lists_changes_nothing(forget_accelerator: Callable[[], None]):
    wanted = train("bf16")
    with hmp.convert(policy="torch-cpu"):
        found = train("bf16")
    assert_same(found, wanted)
    forget_accelerator()
    assert wanted[0] != train("no")[0]


def test_with_its_bf16_hmp_casts_first_and_autocast_has_the_last_word(caplog: pytest.LogCaptureFixture):
    seen: dict[str, torch.dtype] = {}

    class Looking(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.update(linear=self[0](x).dtype, gelu=F.gelu(x).dtype, mul=(x * x).dtype)
            return super().forward(x)

    model = Looking(*net())
    policy = hmp.Policy(bf16={"mul"}, fp32={"linear", "gelu"})
    with caplog.at_level(logging.WARNING, "hmp"), hmp.convert(policy=policy):
        train("bf16", model=model)
    assert seen == {"linear": BF16, "gelu": FP32, "mul": BF16}
    said = [record.message for record in caplog.records if "is enabled where hmp casts" in record.message]
    assert len(said) == 1


def test_its_float32_block_is_float32():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    with hmp.convert():
        assert layer(x).dtype is BF16
        with accelerator.autocast():
            assert layer(x).dtype is BF16
            with accelerator.autocast(AutocastKwargs(enabled=False)):
                assert layer(x).dtype is FP32
        assert layer(x).dtype is BF16


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_its_optimizer_steps_without_casts(precision: str):
    seen = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(hmp.casts_enabled())
            return super().step(closure)

    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
    model = net()
    with hmp.convert():
        model, optimizer = accelerator.prepare(model, Noting(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.randn(2, 8)).float().square().sum())
        optimizer.step()
        assert hmp.casts_enabled()
    assert seen == [False]
    assert {parameter.grad.dtype for parameter in model.parameters()} == {FP32}


def test_its_saved_state_is_float32_and_goes_on(tmp_path: Path):
    with hmp.convert():
        accelerator = accelerate.Accelerator(mixed_precision="no", cpu=True)
        network = net()
        model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5))
        accelerator.backward(model(torch.randn(2, 8)).float().square().sum())
        optimizer.step()
        accelerator.save_state(tmp_path, safe_serialization=False)
        weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        with torch.no_grad():
            network[0].weight.zero_()
        accelerator.load_state(tmp_path)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert {tensor.dtype for tensor in saved.values()} == {FP32}
    assert all(torch.equal(network.state_dict()[name], tensor) and torch.equal(saved[name], tensor) for name, tensor in weights.items())
