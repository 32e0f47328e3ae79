"""``hmp tune recipe.py``: op lists for the user's own model, measured and verified on the user's own task."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import hmp

from .output import Parser, check_page

_INTERRUPTED = 130  # as a shell has it for a command that SIGINT ended


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "tune",
        example="hmp tune recipe.py --tolerance 0.01 --seconds 600",
        help="search for the cheapest op lists for your model",
        description="Searches for the cheapest lists whose loss or metric is within a tolerance of float32's, and writes them into a "
        "folder, with the reason for each entry. Exit status 0 done, 1 if only float32 was within the tolerance or a step failed, 2 for "
        "wrong use, 130 after Ctrl-C: the folder then has the best lists so far.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a Python file with your model, batches and loss; hmp init writes one")
    parser.add_argument("--out", default="tuned", metavar="FOLDER", help="the folder to write the lists into (default tuned)")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.01,
        metavar="T",
        help="how much worse than float32's the metric may be or, without a metric, how far the loss may differ, relative to float32's "
        "(default 0.01); or both bounds: loss=0.01,metric=0.005",
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="start no new trial after S seconds, such as 600")
    parser.add_argument("--max-trials", type=int, metavar="N", help="run at most N trials")
    parser.add_argument("--start", default="autocast", metavar="NAME", help="the preset or folder to start from (default autocast)")
    parser.add_argument(
        "--per-module",
        action="store_true",
        help="decide each op separately in each module; writes entries with a scope, such as linear @ head",
    )
    parser.add_argument("--ops", type=_names, metavar="A,B,...", help="decide only these ops (default: all ops on a preset's lists)")
    parser.add_argument(
        "--levels",
        type=_names,
        default=["bf16", "fp32"],
        metavar="A,B,...",
        help="fp8,bf16,fp32: also move as many matrix multiplication FLOPs to FP8 as the tolerance allows (default bf16,fp32)",
    )
    parser.add_argument(
        "--objective",
        metavar="WORD",
        default="time",
        help="what to minimise: the time of a step (time, the default), its activation memory (memory), or its activation memory with "
        "activations stored in 8 bits (bytes)",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="training steps of a trial (default: one pass over the batches, at least 20)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the model and of every trial (default 0)")
    parser.add_argument("--html", metavar="FILE", help="also write an HTML page")


# Options that are arguments of hmp.tune().
_ARGUMENTS = ("tolerance", "seconds", "max_trials", "start", "per_module", "ops", "levels", "objective", "steps", "seed")


def run(options: argparse.Namespace) -> int:
    """Return 0, 1 if nothing was within the tolerance or a step failed, 2 if something given cannot be used, 130 after Ctrl-C."""
    import torch

    from . import recipe

    folder = Path(options.out)
    check_page(options.html)
    if folder.exists() and not folder.is_dir():
        raise hmp.HmpError(f"{folder}: expected a folder for the lists, got a file; give another --out")
    torch.manual_seed(options.seed)
    found = recipe.load(options.recipe, "tune")
    try:
        model, batches = found.make_model_and_batches(max(options.steps or 0, recipe.MOST_BATCHES))
        arguments = {name: getattr(options, name) for name in _ARGUMENTS}
        given: dict[str, Any] = {"loss": found.loss, "metric": found.metric, "optimizer": found.optimizer}
        result = hmp.tune(model, batches, **given, **arguments, folder=folder, progress=True)
    except KeyboardInterrupt:
        print(f"hmp tune: interrupted; if any lists were verified, the best are in {folder}", file=sys.stderr)
        return _INTERRUPTED
    print(result)
    print()
    print(f"lists, with a reason for each entry: {', '.join(str(folder / f'{cast}.txt') for cast in result.policy.lists)}")
    or_run = "" if result.policy.scoped else f", or hmp run --policy {folder} script.py"
    print(f'use them: hmp.apply(model, "{folder.as_posix()}"){or_run}')
    if options.html is not None:
        print(f"page with all trials: {result.to_html(options.html)}")
    if not any(trial.fits and trial.lists for trial in result.trials):
        print("hmp tune: only float32 is within the tolerance; raise --tolerance", file=sys.stderr)
        return 1
    return 0


def _tolerance(text: str) -> float | dict[str, float]:
    try:
        if "=" not in text:
            return float(text)
        return {name.strip(): float(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid tolerance {text!r}: write 0.01, or loss=0.01,metric=0.005") from None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
