"""HMPPrecision and what surrounds a step: clipping, accumulation, manual optimization, closures, loss scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hmp
from lightning_kit import Steps, both_homes, fit, module, plugin, quiet, trainer
from training_by_hand import assert_same_weights, batches, train_by_hand

pytestmark = quiet
CLIPS = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.001),
}
LIMITS = {"norm": 0.01, "value": 0.001}


@both_homes
@pytest.mark.parametrize(("algorithm", "accumulate"), [("value", 1), ("norm", 2)])
def test_gradients_are_clipped_and_accumulated(home: str, algorithm: str | None, accumulate: int):
    clipping = {"gradient_clip_val": LIMITS[algorithm], "gradient_clip_algorithm": algorithm} if algorithm else {}
    model = fit(home, plugin(), accumulate_grad_batches=accumulate, **clipping)
    losses, network = train_by_hand(clip=CLIPS.get(algorithm), accumulate=accumulate)
    assert model.losses == losses != train_by_hand()[0]
    assert_same_weights(model.net, network)


class Manual(Steps):
    """Optimizes by hand, within the training step."""

    automatic_optimization = False
    clip: float | None = None

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()  # type: ignore[attr-defined]
        optimizer.zero_grad()
        loss = self.loss(batch, "train")
        self.losses.append(loss.item())
        self.manual_backward(loss)  # type: ignore[attr-defined]
        if self.clip is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")  # type: ignore[attr-defined]
        optimizer.step()


@both_homes
def test_manual_optimization_steps_and_clips_without_casts(home: str):
    clip = 0.01
    model = module(home, type("ManualModel", (Manual,), {"clip": clip}))
    fit(home, plugin(), model=model)
    losses, network = train_by_hand(clip=clip and CLIPS["norm"])
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
