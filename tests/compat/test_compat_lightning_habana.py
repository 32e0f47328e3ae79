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
from hmp.compat import habana
from lightning_kit import HOMES, HMPPrecision, Steps, assert_same_weights, batches, both_homes, fit, module, quiet, train_by_hand

pytestmark = quiet
BF16, FP32 = torch.bfloat16, torch.float32
TORCHS = Path(hmp.__file__).resolve().parents[1] / "op_lists" / "torch-cpu@2.13"
TEN = {
    "Limit", "InUse", "MaxInUse", "NumAllocs", "NumFrees", "ActiveAllocs", "MaxAllocSize", "TotalSystemAllocs", "TotalSystemFrees",
    "TotalActiveAllocs",
}  # fmt: skip
# The lines of the guide, each with what keeps it silent; test_compat_lightning_habana_real.py trains by them.
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
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LOWER_LIST", "FP32_LIST", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"):
        monkeypatch.delenv(name, raising=False)
    with habana.install("hpu=cpu"):
        yield


def its() -> Any:
    """lightning_habana."""
    return importlib.import_module("lightning_habana")


def trainer(home: str, **kwargs: Any) -> Any:
    quiet_ones = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return HOMES[home].Trainer(**{"accelerator": its().HPUAccelerator(), "devices": 1, "max_epochs": 2, **quiet_ones, **kwargs})


def trained(home: str, body: type[Steps] = Steps, **kwargs: Any) -> Any:
    model = module(home, body)
    trainer(home, **kwargs).fit(model, batches())
    return model


def lists_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy `torch-cpu`, as Gaudi's autocast is told it."""
    monkeypatch.setenv("LOWER_LIST", str(TORCHS / "bf16.txt"))
    monkeypatch.setenv("FP32_LIST", str(TORCHS / "fp32.txt"))


@both_homes
def test_the_guides_lines(home: str):
    lines = GUIDE
    if home == "pytorch_lightning":
        lines = lines.replace("lightning.pytorch", "pytorch_lightning").replace("from lightning ", "from pytorch_lightning ")
    found: dict[str, Any] = {"silent": {}, "logging": {}}
    exec(lines, found)
    said = [(type(each.strategy).__name__, each.precision, each.world_size) for each in found["trainers"]]
    single = ("SingleHPUStrategy", "32-true", 1)
    mixed = ("SingleHPUStrategy", "bf16-mixed", 1)
    assert said == [mixed, mixed, single, single, single, ("HPUParallelStrategy", "32-true", 2), single]
    strategies = HOMES[home].strategies
    for each in found["trainers"]:
        assert type(each.accelerator) is found["HPUAccelerator"]
        assert isinstance(each.strategy, (strategies.SingleDeviceStrategy, strategies.DDPStrategy))
        assert each.strategy.root_device.type == "hpu"


def test_what_the_accelerator_says():
    HPUAccelerator = its().HPUAccelerator
    assert HPUAccelerator.is_available() is its().HPU_AVAILABLE is True
    assert HPUAccelerator.auto_device_count() == 1
    assert HPUAccelerator.get_parallel_devices(2) == [torch.device("hpu")] * 2
    assert (HPUAccelerator.parse_devices(3), HPUAccelerator.parse_devices("3"), HPUAccelerator.parse_devices(None)) == (3, 3, None)
    assert (HPUAccelerator.name(), HPUAccelerator.get_device_name(), HPUAccelerator.is_lazy()) == ("hpu", "cpu", False)
    assert HPUAccelerator().get_device_stats("hpu").keys() == TEN


@both_homes
def test_lightnings_registries_know_the_names_until_the_shim_is_taken_away(home: str):
    connector = importlib.import_module(f"{home}.trainer.connectors.accelerator_connector")
    its()
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


@both_homes
def test_nothing_is_changed_for_other_devices(home: str):
    assert type(trainer(home, accelerator="cpu").accelerator).__name__ == "CPUAccelerator"
    one = trainer(home, accelerator="cpu", precision="bf16-mixed")
    assert type(one.precision_plugin).__name__ == "MixedPrecision"
    assert type(trainer(home, accelerator="auto", strategy="ddp", devices=2).accelerator).__name__ == "CPUAccelerator"


@both_homes
@pytest.mark.parametrize("name", ["SingleHPUStrategy", "HPUParallelStrategy"])
def test_a_strategy_is_one_of_the_package_whose_trainer_takes_it(home: str, name: str):
    strategy = getattr(its(), name)()  # of lightning, which comes first where both are installed
    made = trainer(home, strategy=strategy)
    assert made.strategy is strategy and type(strategy).__name__ == name
    assert isinstance(strategy, HOMES[home].strategies.Strategy)


# What is computed.


@both_homes
def test_bf16_mixed_is_habanas_policy_and_trains_as_explicit_casts_do(home: str):
    model = trained(home, precision="bf16-mixed")
    losses, network = train_by_hand()
    assert model.losses == losses
    assert_same_weights(model.net, network)


@pytest.mark.slow
@both_homes
@pytest.mark.parametrize("how", ["precision", "plugin", "policy"])
def test_with_torchs_lists_the_losses_are_those_of_plain_lightning(home: str, how: str, monkeypatch: pytest.MonkeyPatch):
    if how == "policy":
        model = trained(home, plugins=[HMPPrecision("torch-cpu")])
    else:
        lists_of_torch(monkeypatch)
        given = {"precision": "bf16-mixed"} if how == "precision" else {"plugins": [its().HPUPrecisionPlugin("bf16-mixed")]}
        model = trained(home, **given)
    theirs = fit(home, precision="bf16-mixed")
    assert model.losses == theirs.losses != train_by_hand()[0]
    assert_same_weights(model.net, theirs.net)
    assert model.dtypes == [("train", BF16)] * 8


@both_homes
def test_without_a_precision_it_trains_as_plain_lightning_does(home: str):
    wanted = fit(home)
    for given in ({}, {"precision": "32-true"}, {"plugins": [its().HPUPrecisionPlugin()]}, {"accelerator": "hpu", "precision": 32}):
        model = trained(home, **given)
        assert model.losses == wanted.losses and model.dtypes == [("train", FP32)] * 8
        assert_same_weights(model.net, wanted.net)


def test_16_mixed_scales_the_loss():
    plugin = trainer("lightning.pytorch", precision="16-mixed").precision_plugin
    assert plugin.policy.dtype is torch.float16 and plugin.scaler.get_scale() == 65536.0


@both_homes
def test_a_checkpoint_goes_to_plain_lightning_and_back(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lists_of_torch(monkeypatch)
    plain = {"accelerator": "cpu"}
    wanted = fit(home, precision="bf16-mixed")
    for first, second in (({}, plain), (plain, {})):
        begun = trainer(home, precision="bf16-mixed", max_epochs=1, **first)
        begun.fit(module(home), batches())
        begun.save_checkpoint(tmp_path / "one.ckpt")
        saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
        assert {(tensor.dtype, tensor.device.type) for tensor in saved.values()} == {(FP32, "cpu")}
        model = module(home)
        trainer(home, precision="bf16-mixed", **second).fit(model, batches(), ckpt_path=str(tmp_path / "one.ckpt"))
        assert model.losses == wanted.losses[4:]
        assert_same_weights(model.net, wanted.net)


def test_a_checkpoint_holds_the_policy_and_another_one_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun = trainer("lightning.pytorch", precision="bf16-mixed", max_epochs=1)
    begun.fit(module("lightning.pytorch"), batches())
    begun.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["HPUPrecisionPlugin"]
    assert hmp.Policy.from_dict(saved["policy"]) == hmp.Policy.load("habana")
    lists_of_torch(monkeypatch)
    with pytest.warns(UserWarning, match=r"give HMPPrecision\(hmp\.Policy\.from_dict\(checkpoint\[\"HPUPrecisionPlugin\"\]\[\"policy\"\]"):
        trainer("lightning.pytorch", precision="bf16-mixed").fit(
            module("lightning.pytorch"), batches(), ckpt_path=str(tmp_path / "one.ckpt")
        )


# What is refused.


@both_homes
def test_what_cannot_be_is_refused(home: str):
    accelerator = its().HPUAccelerator
    for wrong in (0, -1, "two", [0], 1.0, True):
        with pytest.raises(hmp.HmpError, match="HPUAccelerator takes a number of devices, 1 or more, or 'auto'"):
            accelerator.parse_devices(wrong)
    with pytest.raises(hmp.HmpError, match="DDPStrategy is no strategy for 'hpu'; give strategy=\"auto\", or one of hpu_single, hpu_par"):
        trainer(home, strategy="ddp", devices=2)
    with pytest.raises(hmp.HmpError, match=r"precision='64-true' is not one of those on 'hpu' here: bf16-mixed, bf16, 16-mixed, 32-true"):
        trainer(home, precision=64)
    with pytest.raises(hmp.HmpError, match="precision='fp8' is not one of those on 'hpu'"):
        its().HPUPrecisionPlugin("fp8")
    with pytest.raises(hmp.HmpError, match="HPUAccelerator runs on 'hpu', and the strategy's device is 'cpu'"):
        accelerator().setup_device(torch.device("cpu"))
    with pytest.raises(ValueError, match="Received both `precision=bf16-mixed` and `plugins"):
        trainer(home, precision="bf16-mixed", plugins=[its().HPUPrecisionPlugin("bf16-mixed")])


def test_without_a_device_there_is_no_hpu():
    habana.uninstall()
    with habana.install(None):
        assert its().HPUAccelerator.is_available() is its().HPU_AVAILABLE is False
        assert type(trainer("lightning.pytorch", accelerator="auto").accelerator).__name__ == "CPUAccelerator"


def test_more_devices_than_there_are_is_refused_but_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    accelerator = its().HPUAccelerator
    hpu = sys.modules["hmp.compat.habana.hpu"]
    monkeypatch.setattr(hpu, "device_count", lambda: 2)
    monkeypatch.setattr(hpu, "get_device_name", lambda: "NVIDIA")
    assert accelerator.parse_devices(2) == accelerator.auto_device_count() == 2
    with pytest.raises(hmp.HmpError, match="devices=3: 2 stand for 'hpu' here; give that or less, or map it to the CPU"):
        accelerator.parse_devices(3)


REMEDY = "Take what Lightning itself has for it, or install lightning-habana 1.6 with lightning 2.3, which it was made for"


def test_a_name_that_is_not_there_says_so_and_which_are():  # the rest of a stand-in is asked of optimum.habana
    with pytest.raises(ImportError) as error:
        exec("from lightning_habana.pytorch.strategies import HPUDeepSpeedStrategy")
    assert str(error.value) == (
        "lightning_habana.pytorch.strategies has no 'HPUDeepSpeedStrategy' in hmp's stand-in for it, which has what Habana's guides use: "
        f"HPUDDPStrategy, HPUParallelStrategy, SingleHPUStrategy, ddp, parallel, single. {REMEDY}"
    )


def package(folder: Path, text: str) -> None:
    (folder / "lightning_habana").mkdir()
    (folder / "lightning_habana" / "__init__.py").write_text(text)
    (folder / "lightning_habana" / "pytorch.py").write_text("mine = 1\n")


def test_the_package_itself_wins_where_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package(tmp_path, "import lightning_habana.pytorch\nHPUAccelerator = 'theirs'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert its().HPUAccelerator == "theirs" and its().pytorch.mine == 1
    with pytest.raises(ValueError, match="invalid accelerator name"):  # Lightning is left as it is
        HOMES["lightning.pytorch"].Trainer(accelerator="hpu")
    for name in ("lightning_habana", "lightning_habana.pytorch"):
        del sys.modules[name]
