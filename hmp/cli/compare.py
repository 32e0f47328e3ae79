"""``hmp compare recipe.py``: how far each op is from float32, and what to move to the FP32 list first."""

from __future__ import annotations

import argparse
import sys

import hmp

from .output import add_json, check_page, give
from .parser import Parser


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "compare",
        example="hmp compare recipe.py --policy autocast --html comparison.html",
        help="compare every op of your model with float32",
        description="Runs forward and backward of a recipe's first batch under a policy and prints, by op and by module, the error of "
        "each op alone and of all that came before; under several policies, each beside float32 and beside the first. "
        "A recipe is a Python file that defines model(), batches() and loss(model, batch). Exit status 0 done, 1 if the step failed, 2 for "
        "wrong use.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a Python file")
    parser.add_argument(
        "--policy",
        default="autocast",
        metavar="NAMES",
        help="presets or folders of list files, with commas between them (default autocast)",
    )
    parser.add_argument("--against", metavar="NAME", help="another policy, the last one to stand beside the first")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the model and its randomness (default 0)")
    add_json(parser)
    parser.add_argument("--html", metavar="FILE", help="also write a page")


def run(options: argparse.Namespace) -> int:
    """Return 0, 1 if the step failed, 2 if recipe, policy or files cannot be used."""
    import torch

    from ..numerics.compare import compare_under, told_apart
    from ..tune import recipe  # here, with what it imports: other subcommands do without
    from ..tune.recipe import LossAsModel

    check_page(options.html)
    torch.manual_seed(options.seed)
    names = [*options.policy.split(","), *([options.against] if options.against is not None else [])]
    policies = told_apart([hmp.Policy.load(name) for name in names])
    found = recipe.load(options.recipe, "compare")
    step = found.make_step()
    assert step.model is not None  # a recipe for compare has one
    try:
        model = LossAsModel(step.model, found.loss)
        # scoped lines name the modules of the recipe's model; what the loss computes outside follows the others
        result = compare_under(model, (step.batches[0],), policies, lambda loss: loss, scopes=step.model)
    except hmp.HmpError as error:
        print(f"hmp compare: {error}", file=sys.stderr)
        return 1
    if result.rank is None or torch.distributed.get_rank() == 0:  # the first process says it for all
        give(options, result)
    return 0
