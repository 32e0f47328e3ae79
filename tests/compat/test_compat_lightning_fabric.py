"""HMPPrecision in Fabric: calls of the modules that it set up are cast, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hmp
from lightning_kit import FABRICS, HOMES, assert_same_weights, batches, module, net, plugin, quiet, sgd, train_by_hand

pytestmark = quiet
FLOAT16 = hmp.Policy.load("torch-cpu").replace(dtype=torch.float16)


def both_fabrics(test: Callable[..., Any]) -> Any:
    return pytest.mark.sampled(2)(pytest.mark.parametrize("home", FABRICS)(test))


def fabric(home: str, *plugins: Any, **kwargs: Any) -> Any:
    return FABRICS[home].Fabric(accelerator="cpu", devices=1, plugins=list(plugins), **kwargs)


def train(
    run: Any, network: nn.Module | None = None, clip: dict[str, float] | None = None, naming: bool = False
) -> tuple[list[float], nn.Module]:
    """The losses and the network after two epochs under that Fabric."""
    network = net() if network is None else network
    model, optimizer = run.setup(network, sgd(network.parameters()))
    losses = []
    for _ in range(2):
        for x, y in batches():
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            run.backward(loss, **({"model": model} if naming else {}))
            if clip is not None:
                run.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, network


@both_fabrics
@pytest.mark.parametrize(
    ("clip", "by_hand"),
    [
        (None, None),
        ({"max_norm": 0.01}, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01)),
        ({"clip_val": 0.001}, lambda parameters: nn.utils.clip_grad_value_(parameters, 0.001)),
    ],
    ids=["unclipped", "norm", "value"],
)
def test_habanas_policy_trains_as_explicit_casts_do(home: str, clip: dict[str, float] | None, by_hand: Callable[[Any], Any] | None):
    losses, network = train(fabric(home, plugin()), clip=clip)
    wanted = train_by_hand(clip=by_hand)
    assert losses == wanted[0]
    assert_same_weights(network, wanted[1])


@both_fabrics
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.01}])
def test_float16_scales_the_loss_as_16_mixed_does(home: str, clip: dict[str, float] | None):
    theirs = FABRICS[home].plugins.MixedPrecision("16-mixed", "cpu")
    wanted, found = train(fabric(home, theirs), clip=clip), train(fabric(home, plugin(FLOAT16)), clip=clip)
    assert found[0] == wanted[0]
    assert_same_weights(found[1], wanted[1])


@both_fabrics
def test_only_the_modules_calls_and_fabrics_own_region_are_cast(home: str):
    run = fabric(home, plugin())
    model = run.setup(net())
    model(torch.randn(2, 8))
    assert not hmp.casts_enabled() and not hmp.is_converted()
    with run.autocast():
        assert hmp.casts_enabled()
    assert not hmp.casts_enabled()


@both_fabrics
@pytest.mark.parametrize("naming", [False, True], ids=["backward(loss)", "backward(loss, model)"])
def test_a_lightning_module_runs_in_fabric(home: str, naming: bool):
    trainers = dict(zip(FABRICS, HOMES, strict=True))[home]

    class Body:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)  # type: ignore[attr-defined, no-any-return]

    lightning_module = type("Model", (Body, type(module(trainers))), {})()
    lightning_module.prepare()
    losses, _ = train(fabric(home, plugin()), lightning_module, naming=naming)
    assert losses == train_by_hand()[0]
    assert_same_weights(lightning_module.net, train_by_hand()[1])


@both_fabrics
def test_a_checkpoint_holds_float32_and_the_policy_that_it_is_given(home: str, tmp_path: Path):
    used = plugin("bert")
    run = fabric(home, used)
    network = net()
    model, optimizer = run.setup(network, sgd(network.parameters()))
    run.backward(model(torch.randn(2, 8)).square().sum())
    optimizer.step()
    run.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer, "precision": used})
    state = torch.load(tmp_path / "state.ckpt", weights_only=True)
    assert {weight.dtype for weight in state["model"].values()} == {torch.float32}
    assert hmp.Policy.from_dict(state["precision"]["policy"]) == hmp.Policy.load("bert")
    fresh = net()
    again = fabric(home, plugin())
    loaded, _ = again.setup(fresh, sgd(fresh.parameters()))
    with pytest.warns(UserWarning, match="written under policy 'bert' .* goes on under policy 'habana'"):
        again.load(tmp_path / "state.ckpt", {"model": loaded, "precision": again.strategy.precision})
    assert_same_weights(fresh, network)
