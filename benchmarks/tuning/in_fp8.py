"""`python -m benchmarks.tuning.in_fp8`: the matrix products of nine tasks that hmp.tune() puts in FP8, without a device for FP8.

Writes FP8.md and fp8.json; about twenty minutes on one idle core.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hmp

from ..harness import results
from ..harness.results import Row
from ..harness.sides import Side
from . import planted, text
from .evidence import NUDGE
from .task import LOSS, Task
from .tasks import MODELS, PLANTED
from .training import FLOAT32, change, train

COMMITTED = Path(__file__).parents[1] / "results"
LEVELS = ("fp8", "bf16", "fp32")
SEEDS = (0, 1)  # the search's, and another
HALF, AIM = 0.5, 6

# As written, no product of these has dimensions that FP8 takes: 8 brackets, 10 digits. For FP8 a user pads the classes of a model.
PADDED = {"lstm": functools.partial(text.lstm, outputs=16), "large-logits": functools.partial(planted.memory, outputs=16)}
TASKS = {name: dataclasses.replace(task, model=PADDED.get(name, task.model)) for name, task in (MODELS | PLANTED).items()}

Found = dict[str, Any]


def collect(task: Task, max_trials: int | None = None) -> Found:
    """Return the result of a search in FP8 for the task, by module, and of training under its lists, against float32's."""
    started = time.perf_counter()
    torch.manual_seed(0)
    result = hmp.tune(
        task.model(0),
        task.batches(0),
        loss=task.loss,
        tolerance=LOSS,
        optimizer=task.optimizer,
        start=task.start(),
        per_module=True,
        objective="memory",
        levels=LEVELS,
        steps=task.steps,
        max_trials=max_trials,
        progress=False,
    )
    best, able = result.best, [unit for unit in result.units if unit.level == "fp8"]
    low = {unit.op for unit in result.units if unit.name in (*best.on("fp8"), *best.on("bf16"))}
    return {
        "name": task.name,
        "culprits": sorted(task.culprits),
        "culprits low": sorted(task.culprits & low),
        "share": result.share("fp8"),
        "able": sum(unit.gain for unit in able) / max(sum(unit.of for unit in able), 1),
        "units": len(best.on("fp8")),
        "of units": len(able),
        "trials": len(result.trials),
        "changes": [_change(task, result.policy, seed) for seed in SEEDS],
        "nudged": _nudged(task),
        "alone": [trial.loss_change for trial in result.trials if trial.on("fp8")][:1],
        "notes": [f"{unit.name}: {unit.why}" for unit in able if unit.why != "chosen"],
        "seconds": round(time.perf_counter() - started, 1),
    }


def _change(task: Task, policy: hmp.Policy, seed: int) -> float:
    """Return the distance of the loss of a run under the policy from float32's."""
    model = task.model(seed)
    of_model = dataclasses.replace(task, model=lambda _: model, metric=None)
    figure = train(of_model, Side("fp8", region=lambda: hmp.casts(policy, model=model)), seed)
    return change("loss", figure.loss, train(dataclasses.replace(task, metric=None), FLOAT32, seed).loss)


def _nudged(task: Task) -> float:
    """Return the distance of float32's loss, with the other seed, if weights are moved by less than bfloat16's rounding."""
    by_loss = dataclasses.replace(task, metric=None)
    moved, exact = (train(by_loss, FLOAT32, SEEDS[1], nudge=nudge).loss for nudge in (NUDGE, 0.0))
    return change("loss", moved, exact)


def rows(found: Sequence[Found]) -> list[Row]:
    """Return the rows of the aims."""
    bound = LOSS["loss"]
    half = [each for each in found if each["share"] > HALF]
    fine = [each["name"] for each in half if each["changes"][0] <= bound]
    another = [each["name"] for each in half if max(each["changes"]) <= bound]
    said = f"{len(fine)} of {len(found)}: {', '.join(fine)}; with another seed too {len(another)}: {', '.join(another)}"
    what = f"more than half of the products' work in FP8, loss within {100 * bound:.0f} % of float32's"
    made = [Row(what, f"{AIM} of 9", said, len(fine) >= AIM if len(found) == 9 else None)]
    planted = [each for each in found if each["culprits"]]
    if planted:
        low = [f"{each['name']}: {', '.join(each['culprits low'])}" for each in planted if each["culprits low"]]
        said = "; ".join(low) or f"all {len(planted)} in float32"
        made.append(Row("ops of planted failures in few bits", "none", said, not low))
    return made


def report(found: Sequence[Found], about: dict[str, Any], command: str) -> str:
    """Return the page."""
    seconds = sum(each["seconds"] for each in found)
    lines = ["# What FP8 can compute", "", f"`{command}`, {seconds:.0f} s. Written by the command.", ""]
    lines += [f"- {name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in about.items()]
    lines += ["", results.table(rows(found), markdown=True), "", _SAID, ""]
    header = (
        "task",
        "work that FP8 can take",
        "in FP8",
        "modules",
        "loss, the search's seed",
        "another seed",
        "float32 nudged",
        "all in FP8",
        "trials",
    )
    lines += ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *map(_cells, found))]
    lines += ["", *(f"- {each['name']}: {note}" for each in found for note in each["notes"])]
    return "\n".join(lines).rstrip() + "\n"


_SAID = """\
Every matrix product is decided in each module by itself (`levels=("fp8", "bf16", "fp32")`, recipe tensorwise), and verified by training.
Work is floating-point operations of matrix products in forward; convolutions and recurrent layers are none. FP8 takes products whose inner
and outer dimensions are multiples of 16; lstm and large-logits have their 8 and 10 classes padded to that. The losses are those of plain
training loops, not the search's. "float32 nudged" is float32 with the other seed, from weights moved by a thousandth of themselves: what is
no more than that is no doing of FP8. "all in FP8" is how far the loss was in the search with every such product in FP8."""


def _cells(each: Found) -> tuple[str, ...]:
    changes = [f"{100 * value:.2f} % away" for value in (*each["changes"], each["nudged"])]
    alone = f"{100 * each['alone'][0]:+.2f} %" if each["alone"] else "-"
    modules = f"{each['units']} of {each['of units']}"
    return each["name"], f"{each['able']:.0%}", f"{each['share']:.0%}", modules, *changes, alone, str(each["trials"])


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; return 1 if an aim is missed."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.tuning.in_fp8", description=__doc__)
    options.add_argument("--only", action="append", choices=list(TASKS), metavar="NAME", help=f"of {', '.join(TASKS)}; may be given again")
    options.add_argument("--max-trials", type=int, help="of each search (none)")
    options.add_argument("--write", type=Path, default=COMMITTED, metavar="FOLDER", help="for FP8.md and fp8.json")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    found = []
    for name in given.only or TASKS:
        found.append(collect(TASKS[name], given.max_trials))
        print(*_cells(found[-1]), sep="  ", flush=True)
    about = results.machine("cpu")
    command = " ".join(["python -m benchmarks.tuning.in_fp8", *(f"--only {name}" for name in given.only or ())])
    print(results.table(rows(found)))
    given.write.mkdir(parents=True, exist_ok=True)
    (given.write / "FP8.md").write_text(report(found, about, command), encoding="utf-8")
    values = results.plain_values({"command": command, "machine": about, "tasks": found})
    (given.write / "fp8.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.met is False for row in rows(found)) else 0


if __name__ == "__main__":
    sys.exit(main())
