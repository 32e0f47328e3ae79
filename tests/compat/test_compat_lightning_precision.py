"""HMPPrecision in a Trainer: where casts are in force, by which policy, and what they compute."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
from lightning_kit import (
    HOMES,
    HMPPrecision,
    Steps,
    assert_same_weights,
    batches,
    both_homes,
    fit,
    module,
    plugin,
    quiet,
    train_by_hand,
    trainer,
)

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
def test_the_trainer_says_bf16_mixed(home: str):
    assert trainer(home, plugin()).precision == "bf16-mixed"
    assert trainer(home, plugin(hmp.Policy.load("habana").replace(dtype=torch.float16))).precision == "16-mixed"


@both_homes
@pytest.mark.parametrize("step", ["fit", "validate", "test", "predict"])
def test_every_step_is_cast(home: str, step: str):
    model = module(home)
    run = trainer(home, plugin(), max_epochs=1, num_sanity_val_steps=0)
    if step == "fit":
        run.fit(model, batches(), batches())
        assert model.dtypes == [("train", BF16)] * 4 + [("validate", BF16)] * 4
    else:
        getattr(run, step)(model, batches(), **({} if step == "predict" else {"verbose": False}))
        assert model.dtypes == [(step, BF16)] * 4


@both_homes
def test_outputs_are_those_of_bf16_mixed(home: str):
    class Predicting(Steps):
        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net[0](batch[0])  # type: ignore[index, no-any-return]

    ours, theirs = (
        trainer(home, *plugins, **named).predict(module(home, Predicting), batches())
        for plugins, named in (((plugin("torch-cpu"),), {}), ((), {"precision": "bf16-mixed"}))
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype is other.dtype is BF16 and torch.equal(one, other)


@both_homes
def test_nothing_is_cast_after_the_trainer_and_in_another_trainer(home: str):
    wanted = fit(home)
    with_plugin = fit(home, plugin())
    assert not hmp.is_converted() and not hmp.casts_enabled()
    assert with_plugin.net(torch.randn(2, 8)).dtype is FP32
    second = fit(home)
    assert second.losses == wanted.losses and second.dtypes == [("train", FP32)] * 8


class Hooks(Steps):
    """Notes whether casts are in force in what a Trainer calls around the steps."""

    def prepare(self, **kwargs: Any) -> None:
        super().prepare(**kwargs)
        self.cast_in: dict[str, bool] = {}

    def on_train_batch_start(self, *args: Any) -> None:
        self.cast_in["batch start"] = hmp.casts_enabled()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.cast_in["step"] = hmp.casts_enabled()
        return super().training_step(batch, index)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.cast_in["before backward"] = hmp.casts_enabled()

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.cast_in["clipping"] = hmp.casts_enabled()

    def on_train_epoch_end(self) -> None:
        self.cast_in["epoch end"] = hmp.casts_enabled()


@both_homes
def test_only_the_step_is_cast_and_not_the_hooks_around_it(home: str):
    model = fit(home, plugin(), model=module(home, Hooks))
    uncast = dict.fromkeys(("batch start", "before backward", "clipping", "epoch end"), False)
    assert model.cast_in == {"step": True, **uncast}


@both_homes
def test_the_log_averages_in_float32(home: str):
    model = module(home)
    run = trainer(home, plugin(), max_epochs=1)
    run.fit(model, batches(size=7))
    weighted = sum(torch.tensor(loss) * size for loss, size in zip(model.losses, (7, 7, 7, 7, 4), strict=True)) / 32
    assert run.callback_metrics["loss"].item() == weighted.item()
    with hmp.casts():
        assert (torch.tensor(model.losses[0]) * 7).item() != model.losses[0] * 7, "`*` is not rounded here"
    assert "log" not in vars(model)


def test_one_plugin_serves_trainers_of_both_packages():
    shared = plugin()
    losses, network = train_by_hand()
    for home in (*HOMES, *HOMES):
        model = fit(home, shared)
        assert model.losses == losses
        assert_same_weights(model.net, network)
    assert all(isinstance(shared, home.plugins.Precision) for home in HOMES.values())


def write(folder: Path, **lists: str) -> dict[str, str]:
    for name, ops in lists.items():
        (folder / name).write_text(ops)
    return {name: str(folder / name) for name in lists}


@pytest.mark.parametrize(
    ("lower", "fp32"), [("LOWER_LIST", "FP32_LIST"), ("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST")]
)
def test_the_environment_names_the_lists_when_the_plugin_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lower: str, fp32: str):
    for name, path in write(tmp_path, **{lower: "softmax\nrelu\n", fp32: "linear\nrelu\ntanh\n"}).items():
        monkeypatch.setenv(name, path)
    made = HMPPrecision()
    monkeypatch.delenv(lower), monkeypatch.delenv(fp32)
    assert (made.policy.bf16, made.policy.fp32) == ({"softmax", "relu"}, {"linear", "tanh"}), "the lower list wins"
    seen: dict[str, torch.dtype] = {}

    class Noting(Steps):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            out = self.net(x)
            seen.update(linear=self.net[0](x.bfloat16()).dtype, softmax=out.dtype, relu=torch.relu(x).dtype)  # type: ignore[index]
            return (out.float() - y).square().mean()

    fit("lightning.pytorch", made, model=module("lightning.pytorch", Noting), max_steps=1)
    assert seen == {"linear": FP32, "softmax": BF16, "relu": BF16}


@pytest.fixture(autouse=True)
def no_lists_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOWER_LIST", "FP32_LIST", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"):
        monkeypatch.delenv(name, raising=False)


def test_an_argument_wins_over_the_environment_and_without_either_it_is_habanas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert HMPPrecision().policy == hmp.Policy.load("habana") and HMPPrecision().policy.name == "habana"
    monkeypatch.setenv("LOWER_LIST", write(tmp_path, low="softmax\n")["low"])
    assert HMPPrecision().policy.bf16 == {"softmax"}
    assert HMPPrecision("bert").policy == hmp.Policy.load("bert")
    assert HMPPrecision(hmp.Policy(bf16={"mm"})).policy.bf16 == {"mm"}


def test_a_plugin_can_be_pickled_and_copied():
    made = plugin(hmp.Policy.load("bert").replace(dtype=torch.float16))
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert type(other) is HMPPrecision
        assert other.policy == made.policy and other.scaler.state_dict() == made.scaler.state_dict()


def test_a_second_precision_beside_the_plugin_is_lightnings_own_error():
    with pytest.raises(ValueError, match="Received both `precision=bf16-mixed`"):
        trainer("lightning.pytorch", plugin(), precision="bf16-mixed")
