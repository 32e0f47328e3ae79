"""The demo itself: trains, shows the table, checks."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from functools import partial

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import hmp

from ...benchmark.timing import least_seconds
from ...low_kernels import computed_in_float32
from . import check
from .models import MODELS
from .plan import Plan, plan
from .training import FLOAT32, HMP, POLICY, Digits, Outcome, digits, train

_PIPED_WIDTH = 80  # a pipe has no width of its own
_SHOWN = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_SHAPES = ((512, 128), (128, 384))  # of the transformer's widest product
_CALLS = 20
_FASTER = 0.9  # a product that takes more than this of float32's time leaves casts nothing to win


def demonstrate(*, epochs: int | None = None, seed: int = 0, ops: bool = False) -> int:
    """Train every model in every precision, print one table and the verdict, with `ops` what ran; return 0 if the check passed, else 1."""
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
    console.print(f"hmp demo, torch {torch.__version__}, {torch.get_num_threads()} threads")
    console.print(
        f"Trains {len(MODELS)} small models on handwritten digits in float32, under torch.autocast and under hmp, shows what ran in which "
        "dtype, and checks it."
    )
    data = digits()
    planned = plan(data, epochs)
    for line in planned.about():
        console.print(line)
    console.print()
    outcomes = _train_all(console, data, planned, seed)
    print_results(console, list(outcomes.values()), slower(time_ratio()))
    failures = _failures(outcomes)
    for failure in failures:
        console.print(f"check failed: {failure}", style="red", soft_wrap=True)
    if not failures:
        console.print(_passed(), style="green", soft_wrap=True)
    if ops:
        print_ops(console, list(outcomes.values()))
    return 1 if failures else 0


def print_results(console: Console, outcomes: Sequence[Outcome], note: str = "") -> None:
    """Print the table, one row for each model and precision, and the note; both fit into 60 columns."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("model and\nprecision", no_wrap=True)
    for heading in ("test\naccuracy", "step\ntime", "saved for\nbackward", "casts\na step"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = None
    for outcome in outcomes:
        if outcome.model != previous:
            if previous is not None:
                table.add_section()
            table.add_row(outcome.model)
        table.add_row(
            f"  {outcome.precision}",
            "-" if outcome.accuracy is None else f"{outcome.accuracy:.1f} %",
            f"{1000 * outcome.step_seconds:.1f} ms",
            f"{outcome.step.saved_bytes:,} B",
            str(outcome.step.casts),
        )
        previous = outcome.model
    console.print(table)
    if note:
        console.print(f"{note}\n")


def print_ops(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print the ATen ops of each model in each precision, by compute dtype."""
    console.print("\nATen ops of the forward pass, by compute dtype:")
    for outcome in outcomes:
        console.print(f"  {outcome.model}, {outcome.precision}")
        for line in _ran(outcome, console.width):
            console.print(line, soft_wrap=True)


def time_ratio() -> float:
    """Return how long the product takes in bfloat16, relative to float32: of the least disturbed of some calls."""
    left, right = (torch.ones(shape) for shape in _SHAPES)
    low, full = partial(torch.mm, left.bfloat16(), right.bfloat16()), partial(torch.mm, left, right)
    in_low, in_full = least_seconds([low, full], _CALLS, left.device)
    return in_low / in_full


def slower(ratio: float) -> str:
    """Return the sentence for a processor on which low precision saves no time; "" where it can."""
    if ratio <= _FASTER:
        return ""
    wide = torch.bfloat16 in computed_in_float32()
    return (
        f"Low precision saves memory but no time on this processor: a product of matrices takes {ratio:.1f} times as long in "
        "bfloat16 as in float32 by torch's kernel"
        + (", so hmp computes it in float32 on inputs rounded to bfloat16" if wide else "")
        + " (hmp doctor says more)."
    )


def _train_all(console: Console, data: Digits, planned: Plan, seed: int) -> dict[tuple[str, str], Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    outcomes = {}
    # Only a terminal can redraw a line; a pipe gets one plain line for each training instead.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=sum(run.steps for run in planned.runs))
        for run in planned.runs:
            name, precision = run.model, run.precision
            progress.update(task, description=f"{name}, {precision.name}")
            outcomes[name, precision.name] = train(
                name, MODELS[name], data, precision,
                epochs=run.epochs, seed=seed, most_steps=run.steps, advance=lambda: progress.advance(task),
            )  # fmt: skip
            if not console.is_terminal:
                console.print(f"trained {name} in {precision.name}: {run.steps} steps")
    return outcomes


def _failures(outcomes: dict[tuple[str, str], Outcome]) -> list[str]:
    policy = hmp.Policy.load(POLICY)
    failures = []
    for name, make in MODELS.items():
        outcome = outcomes[name, HMP.name]
        failures += check.op_failures(name, check.named(policy, make.calls), outcome.step)
        failures += check.accuracy_failures(outcomes[name, FLOAT32.name], outcome)
    return failures


def _passed() -> str:
    policy = hmp.Policy.load(POLICY)
    checked = check.named(policy, {name for make in MODELS.values() for name in make.calls})
    low = [name for name, dtype in checked.items() if dtype == policy.dtype]
    high = [name for name in checked if name not in low]
    return (
        f"check passed: under {HMP.name} {', '.join(low)} ran in {_SHOWN[policy.dtype]} and {', '.join(high)} in fp32, "
        "at float32's accuracy within one point"
    )


def _ran(outcome: Outcome, width: int) -> list[str]:
    """The ops of each dtype, in lines of that width."""
    ran = {label: outcome.step.ops(dtype) for dtype, label in _SHOWN.items()}
    return [
        line
        for label, ops in ran.items()
        if ops
        for line in textwrap.wrap(f"    {label}: {', '.join(ops)}", width, subsequent_indent=" " * 10, break_long_words=False)
    ]
