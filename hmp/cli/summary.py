"""``hmp summary recipe.py``: the model's layers, the dtype that each computes in, and what it saves for backward."""

from __future__ import annotations

import argparse

import hmp

from .output import Parser, add_json, give


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "summary",
        example="hmp summary recipe.py --policy habana",
        help="show the layers of your model and the dtype that each computes in",
        description="Runs the forward pass of a recipe's first batch under a policy and prints the module tree: each layer's output shape, "
        "parameters, compute dtype, and the bytes that it saves for backward. Exit status 0 done, 1 if the forward pass failed, 2 for "
        "wrong use.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a Python file with your model, batches and loss; hmp init writes one")
    parser.add_argument("--policy", default="autocast", metavar="NAME", help="a preset's name or a folder of list files (default autocast)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the model and its randomness (default 0)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0. What the forward pass raises is raised."""
    import torch

    from ..tools.summary import of_call
    from . import recipe

    torch.manual_seed(options.seed)
    policy = hmp.Policy.load(options.policy)
    found = recipe.load(options.recipe, "summary")
    model, batches = found.make_model_and_batches(1)
    loss = found.loss
    assert loss is not None  # a recipe with a model has one
    give(options, of_call(model, lambda: loss(model, batches[0]), policy))
    return 0
