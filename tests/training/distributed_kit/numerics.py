"""Run by torchrun, with modes: compares with float32 and looks for NaN on two ranks. Writes mode → what each rank was told."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import measured
from parallel_modes import MODES, OUT, WIDTH, Net
from torch import Tensor
from train import explicit

import hmp

POLICY = hmp.Policy("linear", bf16=frozenset({"linear"}))
STEPS = 6


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(0, OUT, (8,), generator=generator)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def squares(out: Tensor) -> Tensor:
    return out.float().square().mean()


def error(got: list[Tensor], want: list[Tensor]) -> float:
    flat = torch.cat([each.flatten() for each in got]), torch.cat([each.flatten() for each in want])
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def by_hand(rank: int, is_sharded: bool) -> tuple[float, float]:
    """The relative errors of a rank's output, and of its part of the gradient, in one process with every cast written out."""

    def run(of: int, in_low: bool) -> list[Tensor]:
        model = net()
        x, _ = batch(of)
        out = explicit(list(model.parameters()), x) if in_low else model(x)
        return [out.detach(), *torch.autograd.grad(squares(out), list(model.parameters()))]

    def mean(in_low: bool) -> list[Tensor]:
        means = [torch.stack(each).mean(0) for each in zip(*(run(of, in_low)[1:] for of in range(2)), strict=True)]
        return [each.chunk(2)[rank] for each in means] if is_sharded else means

    return error(run(rank, True)[:1], run(rank, False)[:1]), error(mean(True), mean(False))


def parallel() -> list[float]:
    """The error of a tensor parallel model's output, and by hand: that of its own result from one process's in float32."""
    x, _ = batch(0)
    model = MODES["tensor parallel"](net()).model
    found = hmp.compare(model, x, POLICY)
    assert found.output is not None
    with torch.no_grad(), hmp.casts(POLICY):
        got = model(x).float()
    return [found.output, error([got], [net()(x).detach()])]


def compared(mode: str) -> dict[str, Any]:
    """What compare() says on this rank, in both runs, and what it should."""
    rank = dist.get_rank()
    model = MODES[mode](net()).model
    x, _ = batch(rank)
    found = hmp.compare(model, x, POLICY, loss=squares)
    alone = hmp.compare(net(), x, POLICY, loss=squares)
    return {
        "told": found.to_dict() | {"rows": None, "date": None},
        "alone": alone.to_dict() | {"rows": None},
        "by hand": [by_hand(each, mode == "fsdp2") for each in range(2)],
    }


def watched(mode: str, where: str, is_loop: bool) -> list[Any]:
    """What a loop is told whose third step has a NaN on rank 1: the finding and its rank, and how many steps were done."""
    rank, done = dist.get_rank(), 0
    model = MODES[mode](net()).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = torch.zeros(())

    def step(number: int) -> None:
        nonlocal done
        is_bad = rank == 1 and number == 2
        x, _ = batch(rank)
        out = model(x)
        if is_bad and where == "forward":
            out = out * (zero / zero)
        squares(out).backward()
        if is_bad and where == "after backward":
            torch.log(zero - 1)
        optimizer.step()
        optimizer.zero_grad()
        if is_bad and where == "assert":
            assert torch.log(zero - 1) > 0
        done += 1

    def told() -> None:
        if not is_loop:
            for number in range(STEPS):
                with hmp.detect_nonfinite():
                    step(number)
            return
        with hmp.detect_nonfinite():
            for number in range(STEPS):
                step(number)

    try:
        with hmp.casts(POLICY):
            told()
    except hmp.NonFiniteError as raised:
        return [raised.finding.rank, raised.finding.op, str(raised).split("`")[0], done]
    return [None, "", "", done]


def all_of(modes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        mode: {
            "compared": compared(mode),
            "watched": {
                f"{where}, {'one region' if is_loop else 'a region a step'}": watched(mode, where, is_loop)
                for where in ("nowhere", "forward", "after backward")
                for is_loop in (True, False)
            },
        }
        for mode in modes
    }
    found["tensor parallel"] = parallel()
    with hmp.detect_nonfinite("log") as findings:  # a region of one rank alone waits for nobody
        if dist.get_rank() == 0:
            with hmp.detect_nonfinite():
                F.relu(torch.ones(2))
    assert not findings
    return found


if __name__ == "__main__":
    measured(all_of)
