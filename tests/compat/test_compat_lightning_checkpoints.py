"""HMPPrecision and checkpoints: float32 weights with the policy beside them, resumed as if not stopped; and what DeviceStats logs."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
from lightning_kit import HOMES, both_homes, fit, module, plugin, quiet, trainer
from oracle import tensors
from training_by_hand import assert_same_weights, batches

pytestmark = quiet
FLOAT16 = hmp.Policy.load("torch-cpu").replace(dtype=torch.float16)


def saved(home: str, folder: Path, *plugins: Any, epochs: int = 1, **kwargs: Any) -> tuple[Path, Any]:
    """A checkpoint after that many epochs, and the model that it is of."""
    model = module(home)
    run = trainer(home, *plugins, max_epochs=epochs, default_root_dir=folder, **kwargs)
    run.fit(model, batches())
    run.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt", model


def resumed(home: str, checkpoint: Path, *plugins: Any, **kwargs: Any) -> Any:
    model = module(home)
    trainer(home, *plugins, default_root_dir=checkpoint.parent, **kwargs).fit(model, batches(), ckpt_path=str(checkpoint))
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


TOLD = {"Limit", "InUse", "MaxInUse"}


def logger(home: str, folder: Path) -> Any:
    return HOMES[home].loggers.CSVLogger(folder, name="", version="")


def logged(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("DeviceStats/InUse")]


@both_homes
def test_it_logs_what_the_device_says(home: str, tmp_path: Path):
    from hmp.compat.lightning import DeviceStats

    run = trainer(home, plugin(), callbacks=[DeviceStats()], logger=logger(home, tmp_path), log_every_n_steps=3)
    run.fit(module(home), batches())
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == ["3", "6"], "8 batches, every third one, counted over epochs"
    said = {name.removeprefix("DeviceStats/"): float(value) for name, value in rows[-1].items() if name.startswith("DeviceStats/")}
    assert said.keys() == TOLD, "what a CPU does not say is not logged"
    now = hmp.memory.memory_stats("cpu")
    assert said["Limit"] == now["Limit"] and 0 < said["InUse"] <= said["MaxInUse"]
