"""``hmp compare recipe.py``: how far each op is from float32, and what to put on the FP32 list first."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import hmp

from .output import check_folder

__all__ = ["add", "run"]


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "compare",
        help="compare every op of your model with float32",
        description="Runs forward and backward of a recipe's first batch under a policy and prints, by op and by module, the error of "
        "each op alone and of all that came before. A recipe is a Python file that defines model(), batches() and loss(model, batch). "
        "Exit status 0 done, 1 if the step failed, 2 for wrong use.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a Python file")
    parser.add_argument("--policy", default="autocast", metavar="NAME", help="a preset's name or a folder of list files (default autocast)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the model and its randomness (default 0)")
    parser.add_argument("--json", metavar="FILE", help="also write every row, as JSON")
    parser.add_argument("--html", metavar="FILE", help="also write a page")
    parser.set_defaults(run=run)


class _Step(torch.nn.Module):
    """The recipe's loss as a module: the model is called by the recipe."""

    def __init__(self, model: torch.nn.Module, loss: Any) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Any:
        return self._loss(self.model, batch)


def run(options: argparse.Namespace) -> int:
    """Return 0, 1 if the step failed, 2 if recipe, policy or files cannot be used."""
    from ..tune import recipe  # here, with what it imports: other subcommands do without

    try:
        check_folder(options.json)
        check_folder(options.html)
        torch.manual_seed(options.seed)
        policy = hmp.Policy.load(options.policy)
        found = recipe.load(options.recipe)
        step = found.make_step()
        if step.model is None:
            raise recipe.RecipeError(f"{options.recipe}: defines step() alone; compare needs model(), batches() and loss(model, batch)")
        if policy.scoped:  # its lines name the modules of the recipe's model; what the loss computes outside follows the others
            hmp.apply(step.model, policy)
            policy = policy.unscoped
    except hmp.HmpError as error:
        print(f"hmp compare: {error}", file=sys.stderr)
        return 2
    try:
        result = hmp.compare(_Step(step.model, found.loss), (step.batches[0],), policy, loss=lambda loss: loss)
    except hmp.HmpError as error:
        print(f"hmp compare: {error}", file=sys.stderr)
        return 1
    print(result)
    if options.json is not None:
        result.to_json(options.json)
    if options.html is not None:
        result.to_html(options.html)
    return 0
