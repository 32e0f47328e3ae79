"""Training steps and inference, hmp and torch.autocast with the same lists, in turns.

A visit is one side's stretch of a round: the policy is put in force, each task takes a few steps that are not counted and then a few
that are, and their median is the visit's sample. The sides' order changes from round to round, and the ratio is taken round by round.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from ..harness import verify
from ..harness.results import Found, Row, at_most
from ..harness.sides import Side, autocast, policy_of, rotated, under_hmp
from ..harness.stats import Estimate, mean_ratio, paired_ratio
from ..harness.timing import WALL, Clock, step_seconds, steps_for
from ..workloads import known, models
from ..workloads.models import Case

TRAINING_TARGET, INFERENCE_TARGET, NONE_ABOVE = 0.90, 0.70, 1.00
# what is timed, and the autograd mode that it runs in; "one" is inference on one example, the others run on the whole batch
TASKS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "training": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "no_grad, one": torch.no_grad,
    "inference_mode, one": torch.inference_mode,
}


def stepper(case: Case, task: str, side: Side) -> Callable[[], object]:
    """One step of `task` on `side`; the model is put in the task's mode."""
    case.model.train(task == "training")
    if task == "training":
        optimizer = torch.optim.SGD(case.model.parameters(), lr=1e-4)
        return lambda: case.step(optimizer, side.run)
    mode = TASKS[task]
    output = case.one_output if task.endswith(", one") else case.output

    def infer() -> None:
        with mode():
            side.run(output)

    return infer


@dataclass
class Timed:
    """Seconds a step, by task and side, one for each round."""

    case: Case
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def ratio(self, task: str, over: str = "autocast", of: str = "hmp") -> Estimate:
        return paired_ratio(self.samples[task][of], self.samples[task][over])


def time_sides(case: Case, sides: list[Side], tasks: Iterable[str], rounds: int, seconds: float, device: str, clock: Clock = WALL) -> Timed:
    """Every side's steps in `rounds` rounds; a task fills about `seconds` of a visit, with the same number of steps on every side."""
    timed = Timed(case, {task: {side.name: [] for side in sides} for task in tasks})
    steps: dict[str, int] = {}
    gc.collect()
    for number in range(rounds):
        for side in rotated(sides, number):
            with side.visit():
                for task, samples in timed.samples.items():
                    step = stepper(case, task, side)
                    if task not in steps:
                        step()
                        steps[task] = steps_for(seconds, step, device, clock.least)
                    samples[side.name].append(step_seconds(step, steps[task], device, clock))
    return timed


def run(names: list[str], sizes: list[str], tasks: list[str], rounds: dict[str, int], seconds: float, device: str) -> Found:
    """The rows about training and inference; what cannot be compared is left out of them and fails the run."""
    found = Found("steps")
    sides = [autocast(device), under_hmp(policy_of(device))]
    found.details = [
        f"policy {policy_of(device)}, bfloat16, {device}, {torch.get_num_threads()} threads; ms a step, medians of "
        + ", ".join(f"{rounds[size]} rounds ({size})" for size in sizes),
        f"{'model':15} {'parameters':>10} {'task':19} {'autocast':>9} {'hmp':>9} {'hmp / autocast':>16}   verified",
    ]
    ratios: dict[str, dict[str, Estimate]] = {task: {} for task in tasks}
    for name in names:
        for size in sizes:
            case = models.build(name, size, device)
            try:
                checked = verify.same_in_each(case, *sides, known.TOLERANCE, known.KNOWN.get(name, {}))
            except verify.Mismatch as mismatch:
                found.failures.append(str(mismatch))
                continue
            timed = time_sides(case, sides, tasks, rounds[size], seconds, device)
            found.samples[case.title] = {"parameters": case.parameters, "seconds a step": timed.samples}
            for task in tasks:
                ratios[task][case.title] = timed.ratio(task)
                found.details.append(_line(case, task, timed, checked[task.partition(",")[0]]))
    found.rows = [row for task in tasks for row in rows(task, ratios[task])]
    found.details += [f"known difference: {reason}" for name in names for reason in dict.fromkeys(known.KNOWN.get(name, {}).values())]
    return found


def _line(case: Case, task: str, timed: Timed, checked: verify.Checked) -> str:
    ms = {side: 1000 * median(samples) for side, samples in timed.samples[task].items()}
    ratio = timed.ratio(task)
    same = "same bits" if not checked.apart else f"{checked.apart:.0e} apart"
    return (
        f"{case.title:15} {case.parameters:10,} {task:19} {ms['autocast']:9.3f} {ms['hmp']:9.3f}   {ratio.text():>14}"
        f"   {checked.ops} ops, {same}{', known difference' if checked.allowed else ''}"
    )


def rows(task: str, ratios: dict[str, Estimate]) -> list[Row]:
    """The task's geometric mean, and its worst model."""
    if not ratios:
        return [Row(f"{task}: hmp / autocast", "", "nothing could be compared", None)]
    target = TRAINING_TARGET if task == "training" else INFERENCE_TARGET
    mean = mean_ratio(list(ratios.values()))
    title = "training step, hmp / autocast" if task == "training" else f"inference, {task}, hmp / autocast"
    worst = max(ratios, key=lambda name: ratios[name].value)
    enough = all(ratio.known for ratio in ratios.values())
    above = [name for name, ratio in ratios.items() if ratio.above(NONE_ABOVE)]
    result = f"worst {ratios[worst].text()} ({worst})"
    if above and enough:
        result += f"; {len(above)} of {len(ratios)} above by more than noise"
    return [
        at_most(f"{title}: geometric mean of {len(ratios)}", target, mean, mean.text()),
        Row(f"{title}: none above", f"≤ {NONE_ABOVE:.2f}", result, not above if enough else None),
    ]


def pure_low(case: Case) -> Case:
    """`case` as a pure bfloat16 model: `model.to(bfloat16)`, and its floating inputs in bfloat16."""
    import copy

    batch: dict[str, Any] = {k: v.bfloat16() if v.is_floating_point() else v for k, v in case.batch.items()}
    return Case(case.name, case.size, copy.deepcopy(case.model).bfloat16(), batch, case.computes_loss)
