"""``hmp init``: a recipe that runs as it is, and says what to change."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import HmpError
from .output import Parser


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "init",
        example="hmp init recipe.py",
        help="write a recipe to start from",
        description="Writes a recipe, a Python file that defines model(), batches(), loss(model, batch), optimizer(model) and "
        "metric(model). It has a small model, so it runs unchanged; comments mark what to replace. hmp benchmark, hmp compare, hmp summary "
        "and hmp tune take it. Exit status 0 done, 2 if the file exists or cannot be written.",
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default="recipe.py", help="the file to write (default recipe.py)")


def run(options: argparse.Namespace) -> int:
    """Return 0, or 2 if the file cannot be written."""
    file = options.recipe
    recipe = Path(__file__).with_name("recipe.txt").read_text(encoding="utf-8")
    try:
        with Path(file).open("x", encoding="utf-8") as stream:
            stream.write(recipe.replace("recipe.py", Path(file).name))
    except FileExistsError:
        raise HmpError(f"{file}: the file exists; give another name, such as hmp init other.py") from None
    except OSError as error:
        raise HmpError(f"{file}: cannot be written ({error.strerror or error}); give a file in a folder that exists") from None
    print(f"{file}: a recipe. It runs as it is; put your own code below each comment CHANGE. Then:")
    print(*(f"  hmp {command} {file}" for command in ("benchmark", "compare", "tune")), sep="\n")
    return 0
