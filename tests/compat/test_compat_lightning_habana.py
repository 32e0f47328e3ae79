"""What Lightning's guide to Gaudi shows runs on the CPU: its lines, its names, what they compute, and what is refused."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
import lightning_kit
from command_kit import python
from hmp.compat import habana
from lightning_kit import HOMES, both_homes, fit, quiet
from training_by_hand import assert_same_weights, train_by_hand

pytestmark = quiet
BF16, FP32 = torch.bfloat16, torch.float32
# The lines of the guide, each with what keeps it silent.
GUIDE = """\
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning_habana.pytorch.accelerator import HPUAccelerator
from lightning_habana.pytorch.plugins.precision import HPUPrecisionPlugin
from lightning_habana.pytorch.strategies import HPUParallelStrategy, SingleHPUStrategy

parallel = HPUParallelStrategy(parallel_devices=[torch.device("hpu")] * 2)
trainers = [
    Trainer(devices=1, accelerator=HPUAccelerator(), precision="bf16-mixed", **silent),
    Trainer(devices=1, accelerator=HPUAccelerator(), plugins=[HPUPrecisionPlugin(device="hpu", precision="bf16-mixed")], **silent),
    Trainer(accelerator="auto", devices="auto", strategy="auto", **silent),
    Trainer(accelerator=HPUAccelerator(), devices="auto", **silent),
    Trainer(accelerator="hpu", devices=1, **silent),
    Trainer(devices=2, num_nodes=1, accelerator=HPUAccelerator(), strategy=parallel, **silent),
    Trainer(accelerator=HPUAccelerator(), callbacks=[DeviceStatsMonitor()], **logging),
]
"""


@pytest.fixture(autouse=True)
def on_cpu(no_lists_in_the_environment: None) -> Iterator[None]:
    with habana.install("hpu=cpu"):
        yield


def its() -> Any:
    """lightning_habana."""
    return importlib.import_module("lightning_habana")


def trainer(home: str, **kwargs: Any) -> Any:
    return lightning_kit.trainer(home, **{"accelerator": its().HPUAccelerator(), **kwargs})


def trained(home: str, **kwargs: Any) -> Any:
    return fit(home, **{"accelerator": its().HPUAccelerator(), **kwargs})


@pytest.mark.slow
@both_homes
def test_the_guides_lines(home: str, tmp_path: Path):
    """In a program of their own, which imports one of the packages."""
    lines = GUIDE
    if home == "pytorch_lightning":
        lines = lines.replace("lightning.pytorch", "pytorch_lightning").replace("from lightning ", "from pytorch_lightning ")
    installed = "from hmp.compat import habana; habana.install('hpu=cpu'); silent = logging = {}"
    where = "assert all(type(it.accelerator) is HPUAccelerator and it.strategy.root_device.type == 'hpu' for it in trainers)"
    shown = "print([(type(it.strategy).__name__, it.precision, it.world_size) for it in trainers])"
    run = python("-c", f"{installed}\n{lines}\n{where}\n{shown}", cwd=tmp_path)
    single, mixed = ("SingleHPUStrategy", "32-true", 1), ("SingleHPUStrategy", "bf16-mixed", 1)
    said = [mixed, mixed, single, single, single, ("HPUParallelStrategy", "32-true", 2), single]
    assert run.stdout.splitlines()[-1:] == [str(said)], run.stderr


@both_homes
def test_lightnings_registries_know_the_names_until_the_shim_is_taken_away(home: str):
    connector = importlib.import_module(f"{home}.trainer.connectors.accelerator_connector")
    trainer(home)
    assert connector.AcceleratorRegistry["hpu"]["accelerator"] is its().HPUAccelerator
    for name, kind in {"hpu_single": "SingleDeviceStrategy", "hpu_parallel": "DDPStrategy", "hpu_ddp": "DDPStrategy"}.items():
        assert issubclass(connector.StrategyRegistry[name]["strategy"], getattr(HOMES[home].strategies, kind))
    assert type(trainer(home, strategy="hpu_parallel", devices=2).strategy).__name__ == "HPUParallelStrategy"
    assert type(trainer(home, strategy="hpu_ddp", devices=2).strategy).__name__ == "HPUDDPStrategy"
    habana.uninstall()
    assert "hpu" not in connector.AcceleratorRegistry and not [name for name in connector.StrategyRegistry if "hpu" in name]
    assert not [name for name in sys.modules if name.startswith("lightning_habana")]
    with pytest.raises(ValueError, match="invalid accelerator name"):
        HOMES[home].Trainer(accelerator="hpu")
    with pytest.raises(ModuleNotFoundError, match="No module named 'lightning_habana'"):
        its()


# What is computed.


@both_homes
def test_bf16_mixed_is_habanas_policy_and_trains_as_explicit_casts_do(home: str):
    model = trained(home, precision="bf16-mixed")
    losses, network = train_by_hand()
    assert model.losses == losses
    assert_same_weights(model.net, network)


@both_homes
def test_without_a_precision_it_trains_as_plain_lightning_does(home: str):
    wanted = fit(home)
    for given in ({}, {"precision": "32-true"}, {"plugins": [its().HPUPrecisionPlugin()]}, {"accelerator": "hpu", "precision": 32}):
        model = trained(home, **given)
        assert model.losses == wanted.losses and model.dtypes == [("train", FP32)] * 8
        assert_same_weights(model.net, wanted.net)


# What is refused.


@both_homes
def test_what_cannot_be_is_refused(home: str):
    accelerator = its().HPUAccelerator
    for wrong in (0, -1, "two", [0], 1.0, True):
        with pytest.raises(hmp.HmpError, match="devices= expected a number >= 1 or 'auto'"):
            accelerator.parse_devices(wrong)
    with pytest.raises(hmp.HmpError, match="expected strategy= to be 'auto' or one of hpu_single, hpu_parallel, hpu_ddp, got DDPStrategy"):
        trainer(home, strategy="ddp", devices=2)
    with pytest.raises(hmp.HmpError, match=r"precision= expected one of bf16-mixed, bf16, 16-mixed, 32-true, 32, got '64-true'"):
        trainer(home, precision=64)
    with pytest.raises(hmp.HmpError, match="got 'fp8'"):
        its().HPUPrecisionPlugin("fp8")
    with pytest.raises(hmp.HmpError, match="expected a strategy on 'hpu', got one on 'cpu'"):
        accelerator().setup_device(torch.device("cpu"))
    with pytest.raises(ValueError, match="Received both `precision=bf16-mixed` and `plugins"):
        trainer(home, precision="bf16-mixed", plugins=[its().HPUPrecisionPlugin("bf16-mixed")])
