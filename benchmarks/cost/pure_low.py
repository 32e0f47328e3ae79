"""The default policy against a model that is bfloat16 throughout: `model.to(bfloat16)` under plain torch."""

from __future__ import annotations

from statistics import median

from ..harness.results import Found, at_most
from ..harness.sides import plain, rotated, under_hmp
from ..harness.stats import Estimate, mean_ratio, paired_ratio
from ..harness.timing import step_seconds, steps_for
from ..workloads import models
from .steps import pure_low, stepper

POLICY, TARGET = "habana", 1.03


def run(names: list[str], sizes: list[str], rounds: int, seconds: float, device: str) -> Found:
    """The row about a training step under the default policy."""
    found = Found("pure-bf16")
    found.details = [
        f"training step, policy {POLICY}, ms, medians of {rounds} rounds",
        f"{'model':15} {'pure bf16':>9} {'hmp':>9} {'hmp / pure bf16':>16}",
    ]
    ratios: dict[str, Estimate] = {}
    for name in names:
        for size in sizes:
            case = models.build(name, size, device)
            # each side has a model of its own
            both = [(under_hmp(POLICY), case), (plain(), pure_low(case))]
            samples: dict[str, list[float]] = {side.name: [] for side, _ in both}
            steps = 0
            for number in range(rounds):
                for side, of_side in rotated(both, number):
                    with side.visit():
                        step = stepper(of_side, "training", side)
                        if not steps:
                            step()
                            steps = steps_for(seconds, step, device)
                        samples[side.name].append(step_seconds(step, steps, device))
            ratio = ratios[case.title] = paired_ratio(samples["hmp"], samples["plain"])
            found.samples[case.title] = samples
            pure, ours = (1000 * median(samples[side]) for side in ("plain", "hmp"))
            found.details.append(f"{case.title:15} {pure:9.3f} {ours:9.3f}   {ratio.text():>14}")
    mean = mean_ratio(list(ratios.values()))
    worst = max(ratios, key=lambda name: ratios[name].value)
    result = f"{mean.text()}; worst {ratios[worst].text()} ({worst})"
    found.rows = [at_most(f"training step, {POLICY} / pure bf16 model: geometric mean of {len(ratios)}", TARGET, mean, result)]
    return found
