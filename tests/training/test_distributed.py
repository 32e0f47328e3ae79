"""Two real processes on gloo: their losses are one process's, the weights that they use are those of now."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hmp

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
    pytest.mark.native_kernels,  # losses and weights are those of explicit casts bit for bit
]

KIT = Path(__file__).parent / "distributed_kit"
BF16 = 2.0**-8  # the unit in the last place of 1.0 is twice that


def launched(folder: Path, script: str, *arguments: list[str], seconds: int = 300) -> list[Any]:
    """What each rank measured. Raises if one fails, or is not done in time: it then kills itself, and what it says is in the error."""
    path = os.pathsep.join([str(Path(hmp.__file__).parents[1]), str(KIT), str(KIT.parents[1] / "support")])
    # tensors are tiny: threads of a rank would only wait for those of the other
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"}
    # standalone: a port that is free
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(KIT / script), str(folder / "rank"), str(seconds), *map(";".join, arguments)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            said, _ = launcher.communicate(timeout=seconds + 120)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # torchrun ends its ranks
            raise
    assert launcher.returncode == 0, said
    return [json.loads((folder / f"rank.{rank}").read_text()) for rank in range(2)]


def check_engines(folder: Path, engines: list[str]) -> None:
    """By apply(), before and behind what the engine does to the model, and by convert(), the losses are those under torch.autocast."""
    for rank in launched(folder, "engines.py", engines):
        assert list(rank) == engines
        for engine, ways in rank.items():
            float32, under_autocast = ways.pop("float32"), ways["autocast"]["losses"]
            if engine != "fsdp2, bf16":  # whose weights are in bfloat16 in the whole forward pass
                assert float32["seen"] == ["float32"] * 3
                assert 0 < max(abs(a - b) / b for a, b in zip(float32["losses"], under_autocast, strict=True)) < BF16, engine
            assert under_autocast[-1] < 0.85 * under_autocast[0], engine
            assert ways.keys() == {"autocast", "convert", "apply", "apply behind"}
            for way, found in ways.items():
                assert found["seen"] == ["bfloat16", "float32", "bfloat16"], (engine, way)  # the model's island stays one
                assert found["losses"] == under_autocast, (engine, way)


DDP = ["ddp, bucket view", "ddp, static graph", "ddp, no_sync", "ddp, own hook"]  # the hook asks whether casts are off (R13)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engines",
    [
        ["ddp", "fsdp2", "tensor parallel", "one mesh, sharded", "one mesh, tensor parallel", "pipeline"],
        [*DDP, "fsdp2, bf16", "fsdp2, no_sync"],
    ],
    ids=["each", "in other ways"],
)
def test_every_engine_of_torch_has_the_losses_of_autocast(engines: list[str], tmp_path: Path) -> None:
    check_engines(tmp_path, engines)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed, which .ci/nightly installs, is not here")
@pytest.mark.parametrize("engines", [["zero 0", "zero 1", "zero 2", "zero 2, more"], ["zero 3"]], ids=" ".join)
def test_deepspeed_has_the_losses_of_autocast(engines: list[str], tmp_path: Path) -> None:
    check_engines(tmp_path, engines)


@pytest.mark.slow
def test_each_of_two_ranks_is_compared_and_watched(tmp_path: Path) -> None:
    ranks = launched(tmp_path, "numerics.py", ["ddp", "fsdp2"], seconds=120)
    output, by_hand = ranks[0]["tensor parallel"]
    assert output == pytest.approx(by_hand, rel=1e-2)
    for mode in ("ddp", "fsdp2"):
        for rank, each in enumerate(ranks):  # each has its own batch, and the gradient of all
            told, alone = each[mode]["compared"]["told"], each[mode]["compared"]["alone"]
            output, gradient = each[mode]["compared"]["by hand"][rank]
            assert told["output"] == alone["output"] == pytest.approx(output, rel=1e-3)
            assert told["gradient"] == pytest.approx(gradient, rel=1e-2)

        for rank, each in enumerate(ranks):  # what a rank is sent by others is theirs to find
            found = each[mode]["watched"]
            assert found.pop("nowhere") == []
            wanted = {"forward": [1, "div", "rank 1: "], "after backward": [1, "log", "rank 1: "]}
            assert {where: first[:1] for where, first in found.items()} == {
                where: [first] if rank else [] for where, first in wanted.items()
            }


@pytest.mark.slow
def test_a_rank_with_a_nan_says_so_and_torchrun_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="NonFiniteError: rank 1: `div` made NaN out of finite inputs"):
        launched(tmp_path, "numerics.py", [], ["ddp"], seconds=120)
    assert time.monotonic() - began < 100


@pytest.mark.slow
def test_r22_what_ranks_keep_for_backward_is_packed_as_one_process_packs_it(tmp_path: Path) -> None:
    """Forward bit for bit as without the list, gradients those of plain autograd with quantised tensors, averaged over the ranks."""
    packed = ["ddp", "ddp, bucket view", "ddp, static graph", "fsdp2"]
    for rank in launched(tmp_path, "packed.py", packed):
        assert [each.pop("mode") for each in rank] == packed
        right = {"forward": True, "gradients": [True] * 4, "packed": [True], "fallbacks": {}, "rounds": True}
        assert all(each == {"eight": right, "saved8": right} for each in rank), rank
