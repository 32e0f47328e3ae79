"""Run by torchrun, with policies and modes: trains in every mode, beside one process alone. Writes a list of what it measured."""

from __future__ import annotations

import contextlib
from typing import Any

import parallel_modes as modes
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import measured
from parallel_modes import MODES, OUT, ROWS, WIDTH, Net, Spread

import hmp

STEPS = 20
LOW = torch.bfloat16


@hmp.disable_casts()
def batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.tanh(x[:, :OUT] + x[:, -OUT:])


@hmp.disable_casts()
def explicit(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What the model gives with these weights: plain torch, every cast written out."""
    w, b, v, c = (each.to(LOW) for each in weights)
    return F.linear(torch.relu(F.linear(x.to(LOW), w, b)), v, c).float()


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference as a part of the largest value."""
    with hmp.disable_casts():
        return float((got.float() - want).abs().max() / want.abs().max())


def train(spread: Spread, rank: int, ranks: int) -> dict[str, Any]:
    """The losses of every step, and how far what the model gave is from what its weights of now and of a step ago give."""
    model, own = spread.model, slice(None)
    if spread.shares_batch:
        own = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    losses, of_now, of_before = [], [], []
    before = None
    for step in range(STEPS):
        weights = [modes.full(p) for p in model.parameters()]
        total = 0.0
        for micro in range(2 if spread.accumulates else 1):
            x, y = (each[own] for each in batch(step, micro))
            silent = spread.accumulates and micro == 0 and ranks > 1
            with modes.no_sync(model) if silent else contextlib.nullcontext():
                with torch.no_grad():
                    seen = model(x)
                out = model(x)
                loss = F.mse_loss(out.float(), y)
                loss.backward()
            total += loss.item()
            with torch.no_grad():
                for each in (seen, out.detach(), model(x)):  # before, in and after the training forward
                    of_now.append(off(each, explicit(weights, x)))
                    if before is not None:
                        of_before.append(off(each, explicit(before, x)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        before = weights
    assert all(p.dtype is torch.float32 for p in model.parameters())
    mean = torch.tensor(losses)
    if ranks > 1:
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        mean /= ranks
    return {"losses": mean.tolist(), "of now": max(of_now), "of before": min(of_before), "weights": flat(model)}


@hmp.disable_casts()
def flat(model: torch.nn.Module) -> torch.Tensor:
    """All weights in one vector."""
    return torch.cat([modes.full(p).flatten() for p in model.parameters()])


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


def measure(mode: str, rank: int, ranks: int) -> dict[str, Any]:
    spread = MODES[mode](fresh())
    found = train(spread, rank, ranks)
    alone = train(Spread(fresh(), spread.accumulates, shares_batch=False), 0, 1)
    with hmp.disable_casts():
        ours, theirs = found.pop("weights"), alone.pop("weights")
        differ = float((ours - theirs).norm() / (theirs - flat(fresh())).norm())
    return {"mode": mode, **found, "losses alone": alone["losses"], "weights differ": differ, "alone of now": alone["of now"]}


def every(policies: list[str], names: list[str]) -> list[dict[str, Any]]:
    results = []
    for policy in policies:
        for mode in names:
            with hmp.convert(policy=policy):
                results.append({"policy": policy, **measure(mode, dist.get_rank(), dist.get_world_size())})
    return results


if __name__ == "__main__":
    measured(every)
