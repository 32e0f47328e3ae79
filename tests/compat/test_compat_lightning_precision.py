"""HMPPrecision in a Trainer and in Fabric: where casts are in force, by which policy, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hmp
from lightning_kit import FABRICS, HOMES, Steps, both_homes, fit, hmp_precision, module, plugin, quiet, trainer
from training_by_hand import assert_same_weights, batches, net, sgd, train_by_hand

pytestmark = quiet
BF16, FP32 = torch.bfloat16, torch.float32


@both_homes
def test_a_policy_of_torchs_lists_trains_as_bf16_mixed(home: str):
    ours, theirs = fit(home, plugin("torch-cpu")), fit(home, precision="bf16-mixed")
    assert ours.losses == theirs.losses
    assert ours.losses != fit(home).losses, "the precision makes no difference here"
    assert_same_weights(ours.net, theirs.net)
    assert ours.dtypes == theirs.dtypes == [("train", BF16)] * 8


@both_homes
def test_every_step_is_cast(home: str):
    model = module(home)
    run = trainer(home, plugin(), max_epochs=1, num_sanity_val_steps=0)
    run.fit(model, batches(), batches())
    assert model.dtypes == [("train", BF16)] * 4 + [("validate", BF16)] * 4
    for step in ("test", "predict"):
        model.dtypes.clear()
        getattr(run, step)(model, batches(), **({} if step == "predict" else {"verbose": False}))
        assert model.dtypes == [(step, BF16)] * 4


def test_one_plugin_serves_trainers_of_both_packages():
    shared = plugin()
    losses, network = train_by_hand()
    for home in (*HOMES, *HOMES):
        model = fit(home, shared)
        assert model.losses == losses
        assert_same_weights(model.net, network)
    assert all(isinstance(shared, home.plugins.Precision) for home in map(HOMES.__getitem__, HOMES))


def write(folder: Path, **lists: str) -> dict[str, str]:
    for name, ops in lists.items():
        (folder / name).write_text(ops)
    return {name: str(folder / name) for name in lists}


@pytest.fixture(autouse=True)
def no_lists_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOWER_LIST", "FP32_LIST", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"):
        monkeypatch.delenv(name, raising=False)


def test_an_argument_wins_over_the_environment_and_without_either_it_is_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    autocast = hmp.Policy.load("autocast")
    assert hmp_precision()().policy == autocast and hmp_precision()().policy.name == autocast.name
    monkeypatch.setenv("LOWER_LIST", write(tmp_path, low="softmax\n")["low"])
    assert hmp_precision()().policy.bf16 == {"softmax"}
    assert plugin("bert").policy == hmp.Policy.load("bert")
    assert plugin(hmp.Policy(bf16={"mm"})).policy.bf16 == {"mm"}


def both_fabrics(test: Callable[..., Any]) -> Any:
    first, *others = FABRICS
    return pytest.mark.parametrize("home", [first, *(pytest.param(home, marks=pytest.mark.nightly) for home in others)])(test)


def fabric(home: str, *plugins: Any, **kwargs: Any) -> Any:
    return FABRICS[home].Fabric(accelerator="cpu", devices=1, plugins=list(plugins), **kwargs)


def train(run: Any) -> tuple[list[float], nn.Module]:
    """The losses and the network after two epochs under that Fabric, with clipped gradients."""
    network = net()
    model, optimizer = run.setup(network, sgd(network.parameters()))
    losses = []
    for _ in range(2):
        for x, y in batches():
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            run.backward(loss)
            run.clip_gradients(model, optimizer, max_norm=0.01)
            optimizer.step()
            optimizer.zero_grad()
    return losses, network


@both_fabrics
def test_habanas_policy_trains_in_fabric_as_explicit_casts_do(home: str):
    losses, network = train(fabric(home, plugin()))
    wanted = train_by_hand(clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01))
    assert losses == wanted[0]
    assert_same_weights(network, wanted[1])


class Disables(Steps):
    """A model whose own code keeps the lists out."""

    def loss(self, batch: Any, step: str) -> torch.Tensor:
        with hmp.disable_casts():
            return super().loss(batch, step)


@both_homes
def test_it_verifies_the_first_step(home: str):
    lists = hmp.Policy(bf16={"linear"})
    with pytest.raises(hmp.errors.ViolationError, match="disable_casts"):
        fit(home, plugin(lists, verify=True), model=module(home, Disables))
    assert torch._C._len_torch_function_stack() == 0
