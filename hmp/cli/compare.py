"""``hmp compare recipe.py``: how far each op is from float32, and what to move to the FP32 list first."""

from __future__ import annotations

import argparse

import hmp

from .output import Parser, add_json, check_page, give


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "compare",
        example="hmp compare recipe.py --policy autocast --html comparison.html",
        help="compare every op of your model with float32",
        description="Runs forward and backward of a recipe's first batch under a policy. Prints what output, loss and gradients gain where "
        "an op computes in float32, and by op and by module the error that each op adds and the error accumulated so far; with --against, "
        "under a second policy too. The output is what the model returns where loss(model, batch) calls it. Exit status 0 done, 1 if the "
        "step failed, 2 for wrong use.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a Python file with your model, batches and loss; hmp init writes one")
    parser.add_argument("--policy", default="autocast", metavar="NAME", help="a preset or a folder of list files (default autocast)")
    parser.add_argument("--against", metavar="NAME", help="a second policy, shown in extra columns")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the model and its randomness (default 0)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="the relative error of the output that moved ops are to reach")
    parser.add_argument("--trials", type=int, default=7, metavar="N", help="how many steps measure moves of ops (default 7)")
    add_json(parser)
    parser.add_argument("--html", metavar="FILE", help="also write an HTML page")


def run(options: argparse.Namespace) -> int:
    """Return 0. What the step raises is raised."""
    import torch

    from ..tools.compare.compare import another, check_search, compare_under
    from . import recipe  # here, with what it imports: other subcommands do without

    check_page(options.html)
    check_search(options.tolerance, options.trials)
    torch.manual_seed(options.seed)
    policy = hmp.Policy.load(options.policy)
    against = None if options.against is None else another(hmp.Policy.load(options.against), policy)
    found = recipe.load(options.recipe, "compare")
    model, batches = found.make_model_and_batches(1)
    step = recipe.RecipeLoss(model, batches[0], recipe=found)
    result = compare_under(step, policy, against, tolerance=options.tolerance, trials=options.trials)
    # each process has compared its own batch, and files have one name
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or torch.distributed.get_rank() == 0:
        give(options, result)
    return 0
