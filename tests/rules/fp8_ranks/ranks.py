"""What each rank runs: a model whose linear layers are in FP8, spread by DDP and FSDP2, against one process with the whole batch."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import hmp

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")


def gradients(model: torch.nn.Module, halves: list[torch.Tensor], policy: hmp.Policy) -> list[torch.Tensor]:
    for half in halves:
        with hmp.casts(policy):
            result = model(half)
        (result.float().square().mean() / len(halves)).backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    for recipe in RECIPES:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        policy = hmp.Policy(fp8={"linear"}, fp8_recipe=recipe)
        halves = list(torch.randn(2, 32, 32))
        alone = gradients(copy.deepcopy(net), halves, policy)
        sharded = copy.deepcopy(net)
        for layer in (sharded[0], sharded[2]):
            fully_shard(layer)
        fully_shard(sharded)
        for name, model in (("ddp", torch.nn.parallel.DistributedDataParallel(copy.deepcopy(net))), ("fsdp2", sharded)):
            got = gradients(model, [halves[rank]], policy)
            found[f"{recipe}, {name}"] = max(float((g - a).abs().max() / a.abs().max()) for g, a in zip(got, alone, strict=True))
    Path(folder, f"rank.{rank}").write_text(json.dumps(found))
    assert hmp.fallbacks() == {}
    dist.barrier()


main(sys.argv[1])
# What was to be found is written, and no rank waits for another. The interpreter's own end is left out: at times a run is aborted in it
# ("terminate called without an active exception", a thread of torch's that is still joinable).
os._exit(0)
