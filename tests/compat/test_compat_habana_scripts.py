"""Scripts written for Gaudi run unmodified."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

import pytest
import torch

from command_kit import ROOT, RUN, python, two_ranks
from hmp.compat import habana

# The usage example that Habana published for HMP, as the tutorial has it.
EXAMPLE = (ROOT / "docs" / "tutorials" / "from_an_hmp_script.py").read_text().partition('SCRIPT = """\\\n')[2].partition('"""')[0]


@pytest.mark.native_kernels
@pytest.mark.slow
def test_the_published_example_runs_verbatim_with_linear_in_bfloat16_and_a_falling_loss(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLE)
    losses: list[float] = []
    mse_loss = torch.nn.functional.mse_loss
    with habana.install("cpu"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "mse_loss", lambda *args: losses.append(mse_loss(*args)) or losses[-1])
        found = runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    assert found["y_pred"].dtype is torch.bfloat16
    assert len(losses) == 500 and losses[-1] < losses[0]
    assert {each.dtype for each in found["model"].parameters()} == {torch.float32}


# Trains as scripts for Gaudi do: the usual imports, autocast, fused optimizer and clipping, lazy mode, memory, hccl.
TRAIN = """\
import os
import torch
import habana_frameworks.torch as ht
import habana_frameworks.torch.core as htcore
import habana_frameworks.torch.distributed.hccl
from habana_frameworks.torch.hpex.normalization import FusedClipNorm
from habana_frameworks.torch.hpex.optimizers import FusedAdamW
from habana_frameworks.torch.utils.library_loader import load_habana_module

load_habana_module()
assert ht.hpu.is_available() and ht.hpu.device_count() > 0
torch.manual_seed(0)
torch.distributed.init_process_group(backend="hccl", device_id=torch.device("hpu:0"))
assert torch.distributed.get_backend() == "hccl"
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
device = torch.device("hpu")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4).to(device))
optimizer, clip = FusedAdamW(model.parameters(), lr=0.05), FusedClipNorm(model.parameters(), 1.0)
x, target, losses = torch.randn(16, 8).to(device, non_blocking=True) + rank, torch.zeros(16, 4, device="hpu"), []
for step in range(20):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device_type="hpu", dtype=torch.bfloat16):
        output = model(x)
        assert output.dtype is torch.bfloat16
        loss = torch.nn.functional.mse_loss(output.float(), target)
    loss.backward()
    htcore.mark_step()
    assert clip.clip_norm(model.parameters()) > 0
    optimizer.step()
    htcore.mark_step()
    losses.append(loss.item())
torch.hpu.synchronize()
assert losses[-1] < losses[0], losses
weight = model.module.weight.detach().clone()
torch.distributed.all_reduce(weight)
assert torch.allclose(weight, size * model.module.weight)
everybody = [None] * size
torch.distributed.all_gather_object(everybody, rank)
torch.distributed.barrier()
assert everybody == list(range(size))
assert torch.hpu.memory_stats()["InUse"] > 0
torch.distributed.destroy_process_group()
print(f"rank {rank} of {size} done", flush=True)
os._exit(0)  # a model in DDP that dies may wait for gloo's threads for ever (see leave() of ddp_run.py)
"""
LAZY = "mark_step() does nothing without Habana's software: ops run when they are called, "


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_training_script_with_hccl_runs(size: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    start = functools.partial(python, **one) if size == 1 else two_ranks
    done = start(*RUN, "--habana", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of {size} done" for rank in range(size)]
    assert done.stderr.count(LAZY) == 1, "rank 0 speaks for all"
