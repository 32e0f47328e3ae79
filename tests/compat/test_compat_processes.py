"""Two gloo processes train as one: Lightning's ddp, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from training_by_hand import net, train_by_hand

HERE = Path(__file__).parent


def run(strategy: str, folder: Path) -> list[dict]:
    """What the two processes wrote."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "LOWER_LIST", "FP32_LIST", "PT_HPU"))}
    env |= {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent / "support")])}
    command = [sys.executable, str(HERE / "ddp_run.py"), strategy, str(folder)]
    done = subprocess.run(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:]
    assert sorted(path.name for path in folder.glob("*.pt")) == ["0.pt", "1.pt"]
    found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert found[0]["process"] != found[1]["process"]
    return found


def distance(weights: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far apart two states are, as a share of how far training moved the weights."""
    start = net().state_dict()
    moved = sum((other[name] - start[name]).square().sum() for name in start).sqrt()
    return float(sum((weights[name] - other[name]).square().sum() for name in start).sqrt() / moved)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_spawn", marks=pytest.mark.nightly)])
def test_two_processes_train_as_one(strategy: str, tmp_path: Path):
    one, other = run(strategy, tmp_path)
    # every process converts: linear and tanh in bfloat16, softmax in float32
    assert one["dtypes"] == other["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
    assert {tensor.dtype for tensor in one["weights"].values()} == {torch.float32}
    losses, network = train_by_hand()  # one process with the batches of both
    assert one["losses"] != other["losses"], "each has samples of its own"
    together = [sum(pair) / 2 for pair in zip(one["losses"], other["losses"], strict=True)]
    assert together == pytest.approx(losses, rel=2**-8)
    assert distance(one["weights"], network.state_dict()) < 2**-8
