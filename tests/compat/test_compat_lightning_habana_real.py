"""Where lightning_habana 1.6 is installed and Habana's software is not, hmp's classes replace it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from command_kit import HABANA, python
from test_compat_lightning_habana import GUIDE

ITSELF = "lightning-habana==1.6.0"
MADE_FOR = ("lightning==2.3.3", "setuptools<81")  # that Lightning imports pkg_resources
TEN = """Limit InUse MaxInUse NumAllocs NumFrees ActiveAllocs MaxAllocSize TotalSystemAllocs TotalSystemFrees TotalActiveAllocs"""
STATISTICS = str(sorted(TEN.split()))
# A model whose forward is under autocast, and the guide's lines, in one process or in two.
SCRIPT = f"""\
import os, sys, warnings
import torch
from lightning import LightningModule
from lightning.pytorch.loggers import CSVLogger

warnings.simplefilter("ignore")
torch.set_num_threads(1)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.losses = torch.nn.Linear(8, 4), []

    def forward(self, x):
        with torch.autocast(device_type="hpu", dtype=torch.bfloat16):
            return self.net(x)

    def training_step(self, batch, index):
        out = self(batch)
        assert out.dtype is torch.bfloat16
        self.losses.append(out.float().square().mean())
        return self.losses[-1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(max_epochs=2, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
silent, logging = dict(logger=False, **quiet), dict(logger=CSVLogger("."), log_every_n_steps=1, **quiet)
{GUIDE}
data = torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=4)
*single, two, monitored = trainers
if "two" in sys.argv:
    two.fit(model := Model(), data)
    os.write(1, f"rank {{two.global_rank}} of {{two.world_size}} has {{model.net.weight.sum().item()!r}}\\n".encode())
    os._exit(0)  # see leave() of ddp_run.py
for trainer in [*single, monitored]:
    trainer.fit(model := Model(), data)
    assert type(trainer.accelerator) is HPUAccelerator and type(trainer.strategy) is SingleHPUStrategy
    assert model.losses[-1] < model.losses[0]
with open("lightning_logs/version_0/metrics.csv") as log:
    print(sorted({{name.rpartition("/")[2] for name in next(log).strip().split(",") if "DeviceStats" in name}}))
print("from", HPUAccelerator.__module__)
"""


def environment(folder: Path, *packages: str) -> Path:
    """A folder with those packages and without what they need, which is here; it goes before what is here."""
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "packages")
    done = python(*pip, *packages, cwd=folder)
    if done.returncode:
        pytest.skip(f"pip does not get {' '.join(packages)}: {done.stderr.strip().splitlines()[-1]}")
    (folder / "script.py").write_text(SCRIPT)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(*HABANA, "script.py", *arguments, cwd=folder, before=folder / "packages")


@pytest.mark.slow
@pytest.mark.parametrize("others", [(), MADE_FOR], ids=["lightning here", "lightning 2.3"])
def test_where_it_does_not_import_the_shim_runs_the_guides_lines(others: tuple[str, ...], tmp_path: Path) -> None:
    """It imports Habana's media engine, which is not there."""
    folder = environment(tmp_path, ITSELF, *others)
    done = run(folder)
    ours = "from hmp.compat.lightning_habana.trainer_classes"
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (0, [STATISTICS, ours]), done.stderr
    assert done.stderr.count("lightning_habana 1.6.0 is installed but does not import (") == 1
    if others:
        two = run(folder, "two")
        said = sorted(line for line in two.stdout.splitlines() if line.startswith("rank"))
        assert two.returncode == 0 and [line[:11] for line in said] == ["rank 0 of 2", "rank 1 of 2"], two.stderr
        assert said[0][11:] == said[1][11:], "both have the same weights"
