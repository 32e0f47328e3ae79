"""``hmp init``: a recipe that runs as it is, and says what to change."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .parser import Parser


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "init",
        example="hmp init recipe.py",
        help="write a recipe to begin with",
        description="Writes a recipe, a Python file that defines model(), batches(), loss(model, batch), optimizer(model) and "
        "metric(model), with a small model that runs as it is and says what to change. hmp benchmark, hmp compare and hmp tune take it. "
        "Exit status 0 done, 2 if the file is there already or cannot be written.",
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
        print(f"hmp init: {file}: is there already; name another file, hmp init other.py, or move this one away", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"hmp init: {file}: cannot be written: {error.strerror or error}; name a file in a folder that is there", file=sys.stderr)
        return 2
    print(f"{file}: a recipe that runs as it is; change what it says CHANGE above. Then:")
    for command, what in (
        ("benchmark", "time, memory and loss, in several precisions"),
        ("compare", "how far each op is from float32"),
        ("tune", "op lists for your model"),
    ):
        print(f"  {f'hmp {command} {file}':{16 + len(file)}}{what}")
    return 0
