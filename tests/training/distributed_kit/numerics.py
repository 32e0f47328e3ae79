"""Run by torchrun, with modes: compares with float32 and looks for NaN on two ranks. Writes mode → what each rank was told."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import measured
from parallel_modes import MODES, OUT, WIDTH, fresh
from torch import Tensor

import hmp

POLICY = hmp.Policy("linear", bf16=frozenset({"linear"}))
STEPS = 6  # the third one has the NaN


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(0, OUT, (8,), generator=generator)


@hmp.disable_casts()
def explicit(weights: list[Tensor], x: Tensor) -> Tensor:
    """What the model gives with these weights: plain torch, every cast written out."""
    w, b, v, c = (each.to(torch.bfloat16) for each in weights)
    return F.linear(torch.relu(F.linear(x.to(torch.bfloat16), w, b)), v, c).float()


def squares(out: Tensor) -> Tensor:
    return out.float().square().mean()


def error(got: list[Tensor], want: list[Tensor]) -> float:
    flat = torch.cat([each.flatten() for each in got]), torch.cat([each.flatten() for each in want])
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def by_hand(rank: int, is_sharded: bool) -> tuple[float, float]:
    """The relative errors of a rank's output, and of its part of the gradient, in one process with every cast written out."""

    def run(of: int, in_low: bool) -> list[Tensor]:
        model = fresh()
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
    model = MODES["tensor parallel"](fresh()).model
    found = hmp.compare(model, x, POLICY)
    assert found.output is not None
    with torch.no_grad(), hmp.casts(POLICY):
        got = model(x).float()
    return [found.output, error([got], [fresh()(x).detach()])]


def compared(mode: str) -> dict[str, Any]:
    """What compare() says on this rank, in both runs, and what it should."""
    rank = dist.get_rank()
    model = MODES[mode](fresh()).model
    x, _ = batch(rank)
    found = hmp.compare(model, x, POLICY, loss=squares)
    alone = hmp.compare(fresh(), x, POLICY, loss=squares)
    return {
        "told": found.to_dict() | {"rows": None, "date": None},
        "alone": alone.to_dict() | {"rows": None},
        "by hand": [by_hand(each, mode == "fsdp2") for each in range(2)],
    }


def step_with_a_nan(model: torch.nn.Module, number: int, where: str) -> None:
    """One step of training; the third one of rank 1 makes a NaN."""
    zero, rank = torch.zeros(()), dist.get_rank()
    is_bad = rank == 1 and number == 2
    out = model(batch(rank)[0])
    if is_bad and where == "forward":
        out = out * (zero / zero)
    squares(out).backward()
    if is_bad and where == "after backward":
        torch.log(zero - 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def watched(mode: str, where: str) -> list[Any]:
    """The findings of a loop on this rank: rank, op, and how each begins."""
    model = MODES[mode](fresh()).model
    with hmp.casts(POLICY), hmp.detect_nonfinite("log") as findings:
        for number in range(STEPS):
            step_with_a_nan(model, number, where)
    return [[each.rank, each.op, str(each).split("`")[0]] for each in findings]


def raises(mode: str) -> None:
    """The same, which ends rank 1; the other one is left in the all-reduce of its gradients."""
    model = MODES[mode](fresh()).model
    with hmp.casts(POLICY), hmp.detect_nonfinite():
        for number in range(STEPS):
            step_with_a_nan(model, number, "forward")


def all_of(modes: list[str], raised: list[str] | None = None) -> dict[str, Any]:
    for mode in raised or ():
        raises(mode)
    found: dict[str, Any] = {
        mode: {"compared": compared(mode), "watched": {where: watched(mode, where) for where in ("nowhere", "forward", "after backward")}}
        for mode in modes
    }
    found["tensor parallel"] = parallel()
    return found


if __name__ == "__main__":
    measured(all_of)
