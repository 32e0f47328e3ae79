"""``hmp benchmark recipe.py``: the user's own step in several precisions, as one table."""

from __future__ import annotations

import argparse
import sys
import traceback

import hmp

from .output import Parser, add_json, give


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "benchmark",
        example="hmp benchmark recipe.py --policies float32,torch.autocast,autocast --seconds 10",
        help="time your training step in several precisions",
        description="Runs a recipe's step under each policy, in turns, and prints time, spread, memory and loss as a table. A recipe may "
        "define step() alone. Exit status 0 done, 1 if the step failed under a policy, 2 for wrong use.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a Python file with your model, batches and loss; hmp init writes one")
    parser.add_argument(
        "--policies",
        metavar="A,B,...",
        help="float32, torch.autocast, presets or folders of list files (default: float32, torch.autocast, and hmp with its lists, "
        "such as torch-cpu)",
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="time for the whole benchmark, at least three rounds (default 30)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="timed steps in each round (default: as many as take 0.2 s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the model and of every round (default 0)")
    parser.add_argument("--device", metavar="NAME", help="the device that the step runs on (default: the model's, else the accelerator)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0 if every policy ran, 1 if the step failed under one, 2 if recipe, policies or options cannot be used."""
    import torch

    from ..tools.benchmark import StepError
    from . import recipe  # here, with what it imports: other subcommands do without

    try:
        torch.manual_seed(options.seed)
        step = recipe.load(options.recipe, "benchmark").make_step()
        result = hmp.benchmark(
            step.run,
            options.policies and [name.strip() for name in options.policies.split(",") if name.strip()],
            model=step.model,
            optimizer=step.optimizer,
            state=step.state,
            seconds=options.seconds,
            steps=options.steps,
            seed=options.seed,
            device=options.device,
        )
    except StepError as error:
        if isinstance(error.__cause__, recipe.RecipeError):
            raise error.__cause__ from None  # wrong use
        traceback.print_exception(error.__cause__, file=sys.stderr)
        print(f"hmp benchmark: {error}", file=sys.stderr)
        return 1
    give(options, result)
    return 1 if any(row.error is not None for row in result) else 0
