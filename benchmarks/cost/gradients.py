"""The distance of each side's gradients from float32's: the norm of the difference over all parameters, relative to float32's norm.

The rounding of one batch is random, so the ratio of the two sides' errors is taken for several seeds of weights and batch.
"""

from __future__ import annotations

import torch

from ..harness.results import Found, Row
from ..harness.sides import Side, autocast, plain, policy_of, under_hmp
from ..harness.stats import Estimate, geometric_mean, paired_ratio
from ..workloads import models
from ..workloads.models import Case

NOT_ABOVE = 1.00


def gradients(case: Case, side: Side) -> torch.Tensor:
    """Return the gradients of one step, of all parameters, as one vector in float64."""
    case.model.train()
    case.model.zero_grad(set_to_none=True)
    with side.visit():
        side.run(case.loss).backward()
    vector = torch.cat([p.grad.double().flatten() for p in case.model.parameters() if p.grad is not None])
    case.model.zero_grad(set_to_none=True)
    return vector


def errors(name: str, size: str, seed: int, device: str) -> dict[str, float]:
    """Return the relative error of each side."""
    exact = gradients(models.build(name, size, device, seed), plain())
    found = {}
    for side in (autocast(device), under_hmp(policy_of(device))):
        # a model of its own: batch_norm's statistics and the like start equal
        found[side.name] = float((gradients(models.build(name, size, device, seed), side) - exact).norm() / exact.norm())
    return found


def run(names: list[str], sizes: list[str], seeds: int, device: str) -> Found:
    """Return the row about gradients."""
    found = Found("gradients")
    found.details = [
        f"relative error of all gradients against float32, {seeds} seeds; ratio: median and noise over seeds",
        f"{'model':15} {'autocast':>10} {'hmp':>10} {'hmp / autocast':>16}",
    ]
    ratios: dict[str, Estimate] = {}
    for name in names:
        for size in sizes:
            each = [errors(name, size, seed, device) for seed in range(seeds)]
            title = f"{name} {size}"
            samples = {side: [error[side] for error in each] for side in ("autocast", "hmp")}
            ratio = ratios[title] = paired_ratio(samples["hmp"], samples["autocast"])
            found.samples[title] = samples
            theirs, ours = (geometric_mean(samples[side]) for side in ("autocast", "hmp"))
            found.details.append(f"{title:15} {theirs:10.2e} {ours:10.2e}   {ratio.text():>14}")
    mean = geometric_mean([ratio.value for ratio in ratios.values()])
    worst = max(ratios, key=lambda title: ratios[title].value)
    above = [title for title, ratio in ratios.items() if ratio.above(NOT_ABOVE)]
    result = f"{mean:.3f}; worst {ratios[worst].text()} ({worst})"
    if above:
        result += f"; {len(above)} of {len(ratios)} above by more than noise"
    what = "gradients' error, hmp / autocast: geometric mean, and none above"
    # rounded as it is printed: the two may add the same numbers in another order
    found.rows = [Row(what, f"≤ {NOT_ABOVE:.2f}", result, round(mean, 3) <= NOT_ABOVE and not above)]
    return found
