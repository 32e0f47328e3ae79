"""``hmp check POLICY``: what each entry of a preset, a folder or list files means, and every problem at once."""

from __future__ import annotations

import argparse
from pathlib import Path

import hmp

from .output import Parser, add_json, give_json


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "check",
        example="hmp check habana\nhmp check my_lists/ --model recipe.py\nhmp check --list bf16 ops.txt",
        help="explain every entry of a preset or of list files, and report problems",
        description="Prints a line for each entry, saying what it does, and a line for each problem. Files that are given together form "
        "one policy, in which an op on two lists is an error. --model checks scopes. Exit status 0 if the lists can be used, 1 if not, "
        "2 for wrong use.",
    )
    parser.add_argument("files", metavar="POLICY", nargs="+", help="a preset's name, a policy's folder, or a list file")
    parser.add_argument(
        "--list", metavar="KIND", help="the list that the files hold: bf16, fp32, promote, fp8 and so on (default: by their names)"
    )
    parser.add_argument("--model", metavar="RECIPE", help="a recipe, in whose model each scope has to match a module (see hmp init)")
    parser.add_argument("--problems", action="store_true", help="print only errors and notes")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0 if the lists can be used, 1 if they cannot, 2 if it is not clear which lists they are."""
    from ..tools import check_lists
    from ..tools.formatting import count

    paths = [_folder(each) for each in options.files]
    files = [each for path in paths for each in check_lists.files_of(path, options.list)]
    model = None
    if options.model is not None:
        from .recipe import load

        model, _ = load(options.model, "summary").make_model_and_batches(1)
    found = check_lists.check(files, [path for path in paths if path.is_dir()], model)
    errors = sum(each.level == "error" for each in found)
    give_json(options.json, {"findings": [each._asdict() for each in found]})
    for each in found:
        if each.level != "ok" or not options.problems:
            print(f"{each.level:5}  {each}")
    notes = sum(each.level == "note" for each in found)
    print(f"{count(len(found), 'finding')}: {count(errors, 'error')}, {count(notes, 'note')}")
    if model is None and any("@" in each.name for each in found):
        print("scopes were not checked: give your model, --model recipe.py (hmp init writes a recipe)")
    return 1 if errors else 0


def _folder(given: str) -> Path:
    """Return the folder of the preset, also for a misspelt one, of which the error says what was meant; else the path itself."""
    from ..core.policy import presets

    path = Path(given)
    is_preset = given in hmp.policies() or not (path.exists() or path.suffix or path.name != given)
    return presets.folder(hmp.Policy.load(given).name) if is_preset else path
