"""Run by torchrun, with modes: trains in one region around the whole loop, each weight used twice a step. Writes mode → same as by hand."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import measured
from torch import Tensor, nn

import hmp

POLICY = hmp.Policy("linear", bf16=frozenset({"linear"}))
MODES = {"ddp": {}, "ddp, bucket view": {"gradient_as_bucket_view": True}, "ddp, static graph": {"static_graph": True}}


class Twice(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.layer, self.by_hand = nn.Linear(16, 16), by_hand

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            given = x, self.layer.weight, self.layer.bias
            x = torch.tanh(F.linear(*(each.bfloat16() for each in given) if self.by_hand else given).float())
        return x


def trained(mode: str, by_hand: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, seen = nn.parallel.DistributedDataParallel(Twice(by_hand), **MODES[mode]), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    with contextlib.nullcontext() if by_hand else hmp.casts(POLICY):
        for _ in range(5):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen += [model.module(x), *(each.clone() for each in model.parameters())]
    return [each.detach() for each in seen]


def all_of(modes: list[str]) -> dict[str, bool]:
    return {mode: all(map(torch.equal, trained(mode, False), trained(mode, True))) for mode in modes}


if __name__ == "__main__":
    measured(all_of)
