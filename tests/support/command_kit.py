"""Processes of the command line and of scripts, and what an import says where a package is missing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = ("-m", "hmp", "run")
HABANA = (*RUN, "--habana", "--device-map", "hpu=cpu")
RECIPE = """\
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2), torch.nn.Softmax(-1))

def batches():
    return [torch.randn(4, 8)]

def loss(model, batch):
    return model(batch).pow(2).mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""
# What a launcher, pytest or a user of Gaudi may have set, and no process here is to follow.
_DROPPED = ("PYTEST_", "LOWER_LIST", "FP32_LIST", "PT_HPU", "RANK", "LOCAL_RANK", "WORLD_SIZE")


def python(*arguments: object, cwd: Path, before: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """A process of this Python in that folder, where `hmp` is this checkout's; what stands in the folder `before` goes before all else."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    path = os.pathsep.join(str(each) for each in (before, ROOT, inherited.get("PYTHONPATH")) if each)
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, env={**inherited, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


def two_ranks(*arguments: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Two processes under torchrun, each with files of its own: in one pipe, a line of one ends up within a line of the other."""
    logs = cwd / "logs"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--redirects", 3, "--log-dir", logs)
    done = python(*launcher, *arguments, cwd=cwd, **env)
    for name in ("stdout", "stderr"):
        setattr(done, name, getattr(done, name) + "".join(file.read_text() for file in sorted(logs.rglob(f"{name}.log"))))
    return done


def install(folder: Path, patch: pytest.MonkeyPatch, package: str, release: str) -> None:
    """Puts the name and number of a release where an installer would, before the one that there is."""
    info = folder / f"{package.replace('-', '_')}-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
    patch.syspath_prepend(folder)


def error_without(module: str, *packages: str) -> str:
    """What an import of this module of hmp's says where these packages are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
            patch.delitem(sys.modules, name)
        for package in packages:
            patch.setitem(sys.modules, package, None)  # an import of it raises
        with pytest.raises(ImportError) as error:
            importlib.import_module(module)
    return str(error.value)
