"""HMPPrecision in a Trainer and in Fabric: which policy casts where, what it computes, what surrounds a step, and checkpoints."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hmp
from command_kit import ROOT, python
from lightning_kit import FABRICS, HOMES, Steps, both_fabrics, both_homes, fit, hmp_precision, module, plugin, quiet, trainer
from oracle import tensors
from training_by_hand import assert_same_weights, batches, net, sgd, train_by_hand

pytestmark = [quiet, pytest.mark.usefixtures("no_lists_in_the_environment")]
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


def test_an_argument_wins_over_the_environment_and_without_either_it_is_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    autocast = hmp.Policy.load("autocast")
    assert hmp_precision()().policy == autocast and hmp_precision()().policy.name == autocast.name
    (tmp_path / "low").write_text("softmax\n")
    monkeypatch.setenv("LOWER_LIST", str(tmp_path / "low"))
    assert hmp_precision()().policy.bf16 == {"softmax"}
    assert plugin("bert").policy == hmp.Policy.load("bert")
    assert plugin(hmp.Policy(bf16={"mm"})).policy.bf16 == {"mm"}


@both_fabrics
def test_habanas_policy_trains_in_fabric_as_explicit_casts_do(home: str):
    """Two epochs, with clipped gradients."""
    run, network = FABRICS[home].Fabric(accelerator="cpu", devices=1, plugins=[plugin()]), net()
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
    wanted, by_hand = train_by_hand(CLIPS["norm"])
    assert losses == wanted
    assert_same_weights(network, by_hand)


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


CLIPS = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.001),
}


@both_homes
@pytest.mark.parametrize(("algorithm", "limit", "accumulate"), [("value", 0.001, 1), ("norm", 0.01, 2)])
def test_gradients_are_clipped_and_accumulated(home: str, algorithm: str, limit: float, accumulate: int):
    model = fit(home, plugin(), accumulate_grad_batches=accumulate, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
    losses, network = train_by_hand(CLIPS[algorithm], accumulate)
    assert model.losses == losses != train_by_hand()[0]
    assert_same_weights(model.net, network)


class Manual(Steps):
    """Optimizes by hand, within the training step."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()  # type: ignore[attr-defined]
        optimizer.zero_grad()
        loss = self.loss(batch, "train")
        self.losses.append(loss.item())
        self.manual_backward(loss)  # type: ignore[attr-defined]
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")  # type: ignore[attr-defined]
        optimizer.step()


@both_homes
def test_manual_optimization_steps_and_clips_without_casts(home: str):
    model = fit(home, plugin(), model=module(home, Manual))
    losses, network = train_by_hand(CLIPS["norm"])
    assert model.losses == losses
    assert_same_weights(model.net, network)


class All(Steps):
    """Notes the dtypes of gradients, and what it logs."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = {p.grad.dtype for p in self.net.parameters()}

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        self.log("third", torch.tensor(1 / 3))


def run_every_step(home: str, model: Any, *plugins: Any) -> Any:
    made = trainer(home, *plugins, fast_dev_run=1)
    made.fit(model, batches(8), batches(8))
    third = made.callback_metrics["third"]
    made.test(model, batches(8))
    made.predict(model, batches(8))
    return third


@both_homes
@pytest.mark.parametrize("plugins", [(), ("torch-cpu",), (hmp.Policy("wide", fp32={"linear"}),)], ids=["alone", "same", "other"])
def test_a_policy_applied_to_a_lightning_module_casts_in_every_step(home: str, plugins: tuple[Any, ...]):
    """With HMPPrecision, too, whose lists those of the module replace."""
    plain, model = module(home, All), module(home, All)
    step = type(model).training_step
    hmp.apply(model, "torch-cpu")
    third = run_every_step(home, model, *map(plugin, plugins))
    assert {name for name, _ in model.dtypes} == {"train", "validate", "test", "predict"}
    assert {dtype for _, dtype in model.dtypes} == {torch.bfloat16}
    assert model.gradients == {torch.float32} and third.item() == torch.tensor(1 / 3).item()
    assert all(p.dtype is torch.float32 for p in model.parameters())
    hmp.remove(model)
    model.dtypes.clear()
    run_every_step(home, model)
    run_every_step(home, plain)
    assert {dtype for _, dtype in model.dtypes + plain.dtypes} == {torch.float32}
    if plugins:
        hmp.revert()  # a Trainer with the plugin leaves torch patched
    assert type(model).training_step is step


@both_homes
def test_a_policy_applied_to_a_lightning_module_trains_as_the_plugin_does(home: str):
    applied, in_plugin = fit(home, model=hmp.apply(module(home), "torch-cpu")), fit(home, plugin("torch-cpu"))
    assert applied.losses == in_plugin.losses != fit(home).losses
    assert_same_weights(applied.net, in_plugin.net)


@both_homes
def test_methods_that_are_named_replace_the_steps(home: str):
    model = hmp.apply(module(home), "torch-cpu", methods=("forward",))
    assert {dtype for _, dtype in fit(home, model=model).dtypes} == {torch.float32}


FLOAT16 = hmp.Policy.load("torch-cpu").replace(dtype=torch.float16)


def saved(home: str, folder: Path, *plugins: Any) -> tuple[Path, Any]:
    """A checkpoint after one epoch, and the model that it is of."""
    model = module(home)
    run = trainer(home, *plugins, max_epochs=1, default_root_dir=folder)
    run.fit(model, batches())
    run.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt", model


def resumed(home: str, checkpoint: Path, *plugins: Any) -> Any:
    model = module(home)
    trainer(home, *plugins, default_root_dir=checkpoint.parent).fit(model, batches(), ckpt_path=str(checkpoint))
    return model


@both_homes
def test_a_checkpoint_holds_float32_and_the_policy(home: str, tmp_path: Path):
    path, model = saved(home, tmp_path, plugin("bert"))
    checkpoint = torch.load(path, weights_only=True)
    assert {tensor.dtype for tensor in tensors(checkpoint) if tensor.is_floating_point()} == {torch.float32}
    assert len(list(tensors(checkpoint["optimizer_states"]))) == 4
    for name, weight in model.state_dict().items():
        assert torch.equal(checkpoint["state_dict"][name], weight)
    policy = hmp.Policy.from_dict(checkpoint["HMPPrecision"]["policy"])
    assert policy == hmp.Policy.load("bert") and policy.name == "bert"


@both_homes
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(home: str, tmp_path: Path):
    policy = FLOAT16
    path, _ = saved(home, tmp_path, plugin(policy))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the checkpoint was written under")
        again = resumed(home, path, plugin(policy.replace(name="of another name")))
    wanted = fit(home, plugin(policy))
    assert again.losses == wanted.losses[4:]
    assert_same_weights(again.net, wanted.net)


@both_homes
def test_resuming_under_another_policy_warns_with_both(home: str, tmp_path: Path):
    path, _ = saved(home, tmp_path, plugin("bert"))
    with pytest.warns(UserWarning, match="expected the checkpoint's policy 'bert' .* got policy 'habana' .* use HMPPrecision"):
        resumed(home, path, plugin())


@both_homes
def test_it_logs_what_the_device_says(home: str, tmp_path: Path):
    from hmp.compat.lightning import DeviceStats

    logger = HOMES[home].loggers.CSVLogger(tmp_path, name="", version="")
    fit(home, plugin(), callbacks=[DeviceStats()], logger=logger, log_every_n_steps=3)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("DeviceStats/InUse")]
    assert [row["step"] for row in rows] == ["3", "6"], "8 batches, every third one, counted over epochs"
    said = {name.removeprefix("DeviceStats/"): float(value) for name, value in rows[-1].items() if name.startswith("DeviceStats/")}
    assert said.keys() == {"Limit", "InUse", "MaxInUse"}, "what a CPU does not say is not logged"
    now = hmp.memory.memory_stats("cpu")
    assert said["Limit"] == now["Limit"] and 0 < said["InUse"] <= said["MaxInUse"]


def distance(weights: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far apart two states are, as a share of how far training moved the weights."""
    start = net().state_dict()
    moved = sum((other[name] - start[name]).square().sum() for name in start).sqrt()
    return float(sum((weights[name] - other[name]).square().sum() for name in start).sqrt() / moved)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_spawn", marks=pytest.mark.nightly)])
def test_two_processes_train_as_one(strategy: str, tmp_path: Path):
    done = python(Path(__file__).with_name("ddp_run.py"), strategy, tmp_path, cwd=tmp_path, before=ROOT / "tests" / "support")
    assert done.returncode == 0, done.stderr[-6000:]
    one, other = (torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("*.pt")))
    assert one["process"] != other["process"]
    # every process converts: linear and tanh in bfloat16, softmax in float32
    assert one["dtypes"] == other["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
    assert {tensor.dtype for tensor in one["weights"].values()} == {torch.float32}
    losses, network = train_by_hand()  # one process with the batches of both
    assert one["losses"] != other["losses"], "each has samples of its own"
    together = [sum(pair) / 2 for pair in zip(one["losses"], other["losses"], strict=True)]
    assert together == pytest.approx(losses, rel=2**-8)
    assert distance(one["weights"], network.state_dict()) < 2**-8
