"""An optimizer of Habana's that stands for another one is treated as that one is: beside a twin that plain torch drives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

Optimizer = torch.optim.Optimizer


pytestmark = pytest.mark.usefixtures("hpu_on_cpu")


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (4,))]


def wrapped(inner: Optimizer, mask: int = 0) -> Any:
    """LARS that does nothing of its own, unless the mask says so."""
    from habana_frameworks.torch.hpex.optimizers import FusedLars

    return FusedLars(inner, [mask] * sum(len(group["params"]) for group in inner.param_groups), eeta=0.1)


def take(optimizer: Optimizer, steps: int = 2, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator) * scale
        optimizer.step()


def seen(value: Any) -> Any:
    """What == compares: numbers for tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: seen(each) for key, each in value.items()}
    return [seen(each) for each in value] if isinstance(value, (list, tuple)) else value


# Each does something with an optimizer and the one within, which are one for the twin: the optimizer to look at then, what was seen.
Treated = tuple[Optimizer, Any]


def deep_copied(optimizer: Optimizer, within: Optimizer) -> Treated:
    take(optimizer)
    other = copy.deepcopy(optimizer)
    take(optimizer)  # the copy does not follow
    return other, optimizer.state_dict()


def scheduled(optimizer: Optimizer, within: Optimizer) -> Treated:
    both = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.StepLR(optimizer, 3, 0.5)]
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    rates = []
    for loss in (1.0, 0.5, 0.5, 0.6):
        take(optimizer, 1)
        for scheduler in both:
            scheduler.step()
        plateau.step(loss)
        rates.append(within.param_groups[0]["lr"])
    return optimizer, [rates, len(set(rates))]


def scaled(optimizer: Optimizer, within: Optimizer) -> Treated:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(sum(param.square().sum() for param in optimizer.param_groups[0]["params"]) * factor).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales += [scaler.get_scale(), norm]
    return optimizer, scales


def loaded(optimizer: Optimizer, within: Optimizer) -> Treated:
    take(optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    take(optimizer, 1)
    optimizer.load_state_dict(kept)
    with pytest.raises(ValueError, match="different number of parameter groups") as refused:
        optimizer.load_state_dict({**kept, "param_groups": []})
    return optimizer, [kept, str(refused.value)]


TREATMENTS = [deep_copied, scheduled, scaled, loaded]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("treat", TREATMENTS, ids=lambda treat: treat.__name__)
def test_it_is_treated_as_the_one_within(treat: Callable[..., Treated]) -> None:
    plain, inner = (torch.optim.SGD(parameters(), 0.1, 0.9) for _ in range(2))
    (theirs, they_saw), (ours, we_saw) = treat(plain, plain), treat(wrapped(inner), inner)
    assert seen(we_saw) == seen(they_saw)
    take(theirs)
    take(ours)
    assert type(ours).__name__ == "FusedLars"
    assert seen(ours.state_dict()) == seen(theirs.state_dict())
    assert seen([group["params"] for group in ours.param_groups]) == seen([group["params"] for group in theirs.param_groups])
