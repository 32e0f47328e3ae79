"""Run by torchrun, with engines: trains by each in float32, under torch.autocast and by hmp. Writes engine → way → what it measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import measured
from parallel_modes import MODES, ROWS, Net, Spread, batch, no_sync
from torch import Tensor, nn

import hmp

# the lists of torch.autocast; habana's make the same of this model, but round what DeepSpeed itself multiplies
STEPS, POLICY = 12, "torch-cpu"
# "apply" before what the engine does to the model, and behind it; "convert" first, as ZeRO-3 replaces F.linear for the process's life
WAYS = ("convert", "float32", "autocast", "apply", "apply behind")
Step = Callable[[Tensor, Tensor], float]
Behind = Callable[[Any], Any]


class WithIsland(Net):
    """A Net with a float32 island between its products, as transformers' models have them. It notes the dtypes around and in there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext():
            turned = torch.mm(hidden.float(), torch.eye(hidden.shape[1]))
        out = self.down(torch.relu(turned.to(hidden.dtype)))
        self.seen = [str(each.dtype).removeprefix("torch.") for each in (hidden, turned, out)]
        return out


def stepping(model: nn.Module, spread: Spread) -> Step:
    """A step of a loop of one's own, of two micro-batches where gradients are accumulated, and an evaluation of the new weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

    def step(x: Tensor, y: Tensor) -> float:
        count = 2 if spread.accumulates else 1
        total = 0.0
        for at, (rows, wanted) in enumerate(zip(x.chunk(count), y.chunk(count), strict=True)):
            with no_sync(model) if at + 1 < count else contextlib.nullcontext():
                loss = F.mse_loss(model(rows).float(), wanted) / count
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return total + F.mse_loss(model(x).float(), y).item()

    return on_own_rows(step) if spread.shares_batch else step


def on_own_rows(step: Step) -> Step:
    """A step in which each rank sees its rows only."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)

    def mean(x: Tensor, y: Tensor) -> float:
        total = torch.tensor(step(x[own], y[own]))
        dist.all_reduce(total)
        return total.item() / ranks

    return mean


def of_mode(name: str) -> Callable[[Net, Behind], Step]:
    """One of torch's own ways to spread a model."""

    def spread(net: Net, behind: Behind) -> Step:
        made = MODES[name](net)
        return stepping(behind(made.model), made)

    return spread


def pipeline(net: Net, behind: Behind) -> Step:
    """One product on each rank, and four micro-batches in the schedule 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    setattr(net, "up" if rank else "down", nn.Identity())
    stage = PipelineStage(behind(net), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, y: F.mse_loss(out.float(), y))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)

    def step(x: Tensor, y: Tensor) -> float:
        losses: list[Tensor] = []
        if rank:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step(x)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean() if rank else torch.zeros(())
        dist.broadcast(mean, src=1)
        return mean.item()

    return step


def zero(stage: int, **more: Any) -> Callable[[Net, Behind], Step]:
    """DeepSpeed's engine."""

    def spread(net: Net, behind: Behind) -> Step:
        import deepspeed

        micro = ROWS // dist.get_world_size()
        config = {"train_micro_batch_size_per_gpu": micro, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config | more)
        behind(engine)

        def step(x: Tensor, y: Tensor) -> float:
            loss = F.mse_loss(engine(x).float(), y)
            engine.backward(loss)
            engine.step()
            return loss.item()

        return on_own_rows(step)

    return spread


ENGINES: dict[str, Callable[[Net, Behind], Step]] = {
    **{name: of_mode(name) for name in MODES},
    "pipeline": pipeline,
    **{f"zero {stage}": zero(stage) for stage in range(4)},
    "zero 2, more": zero(2, gradient_accumulation_steps=2, gradient_clipping=0.5),
}


def run(engine: str, way: str) -> dict[str, Any]:
    """The loss of each step, and the dtypes of the first product, of the island and of the second."""
    torch.manual_seed(0)
    net = WithIsland()
    if way == "autocast":
        net.forward = torch.autocast("cpu", torch.bfloat16)(net.forward)
    with hmp.convert(policy=POLICY if engine.startswith("zero") else "habana") if way == "convert" else contextlib.nullcontext():
        if way == "apply":
            hmp.apply(net, POLICY)
        step = ENGINES[engine](net, lambda model: hmp.apply(model, POLICY) if way == "apply behind" else model)
        losses = [step(*batch(number)) for number in range(STEPS)]
    hmp.revert()
    return {"losses": losses, "seen": net.seen}


if __name__ == "__main__":
    measured(lambda engines: {engine: {way: run(engine, way) for way in WAYS} for engine in engines})
