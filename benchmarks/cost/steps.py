"""Training steps and inference: float32, torch.autocast, hmp with the same lists, and a pure bfloat16 model.

All sides of a model are measured in one interleaving, from which every row is made.
"""

from __future__ import annotations

from statistics import median

import torch

from ..harness import verify
from ..harness.results import Found
from ..harness.sides import autocast, plain, policy_of, under_hmp
from ..workloads import known, models
from ..workloads.models import Case
from . import step_rows
from .interleaved import Lane, own, pure_low, ratio, time_lanes
from .scale import Scale
from .step_rows import BATCH, Measured

SIDES = ("float32", "autocast", "hmp", "pure")


def run(names: list[str], tasks: list[str], much: Scale, device: str) -> Found:
    """Return the rows about training and inference. A model that cannot be compared is left out, and fails the run."""
    found = Found("steps")
    sizes = list(much.sizes)
    found.details = [
        f"policy {policy_of(device)}, bfloat16, {device}, {torch.get_num_threads()} threads; ms a step, medians of "
        + ", ".join(f"{much.rounds[size]} rounds ({size})" for size in sizes),
        f"{'model':15} {'task':19}" + "".join(f" {side:>9}" for side in SIDES) + f" {'hmp / autocast':>16}   verified",
    ]
    measured: dict[str, Measured] = {}
    for name in names:
        for size in sizes:
            case = models.build(name, size, device)
            try:
                checked = verify.same_in_each(
                    case, autocast(device), under_hmp(policy_of(device)), known.TOLERANCE, known.known(name, device)
                )
            except verify.Mismatch as mismatch:
                found.failures.append(str(mismatch))
                continue
            samples = time_lanes(lanes(case, tasks, device), much.rounds[size], much.seconds, device)
            of_model = measured[case.title] = Measured(size, samples)
            found.samples[case.title] = {"parameters": case.parameters, "seconds a step": samples}
            found.details += [_line(case, task, of_model, checked[task.partition(",")[0]]) for task in tasks]
    _rows(found, measured, tasks, sizes)
    found.details += [f"known difference: {reason}" for name in names for reason in dict.fromkeys(known.known(name, device).values())]
    return found


def lanes(case: Case, tasks: list[str], device: str) -> list[Lane]:
    """Return every side with the tasks that the rows need."""
    train = tuple(task for task in tasks if task == "training")
    batch = tuple(task for task in tasks if task in BATCH)
    found = [
        Lane(autocast(device), own(case), tuple(tasks)),
        Lane(under_hmp(policy_of(device)), own(case), tuple(tasks)),
        Lane(plain("pure"), pure_low(case), train + batch),
        Lane(plain("float32"), own(case), train),
    ]
    return [lane for lane in found if lane.tasks]


def _line(case: Case, task: str, of_model: Measured, checked: verify.Checked) -> str:
    sides = of_model.samples[task]
    times = "".join(f" {1000 * median(sides[side]):9.3f}" if side in sides else f" {'':9}" for side in SIDES)
    same = "same bits" if not checked.apart else f"{checked.apart:.0e} apart"
    return (
        f"{case.title:15} {task:19}{times}   {ratio(of_model.samples, task).text():>14}"
        f"   {checked.ops} ops, {same}{', known difference' if checked.allowed else ''}"
    )


def _rows(found: Found, measured: dict[str, Measured], tasks: list[str], sizes: list[str]) -> None:
    if "training" in tasks:
        step_rows.training(found, measured)
    if [task for task in tasks if task != "training"]:
        step_rows.inference(found, measured, tasks, sizes)
