"""``hmp check FILE...``: what each name in list files stands for, and every problem at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from .output import add_json, give_json
from .parser import Parser


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "check",
        example="hmp check my_lists/\nhmp check --list bf16 ops.txt",
        help="explain every name in list files, and every problem",
        description="Prints a line for each name with what it does, and for each problem. Files that are given together are one "
        "policy: a name on two of its lists is a problem. Exit status 0 if the lists can be used, 1 if not, 2 for wrong use.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="a list file, or a policy's folder")
    parser.add_argument(
        "--list", choices=("fp8", "bf16", "fp32", "promote", "saved"), help="which list the files are (default: what their names say)"
    )
    parser.add_argument("--problems", action="store_true", help="print problems and notes only")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0 if the lists can be used, 1 if they cannot, 2 if it is not clear which lists they are."""
    from ..diagnostics import check_lists
    from ..formatting import count

    files = [each for path in options.files for each in check_lists.files_of(path, options.list)]
    found = check_lists.check(files, [path for path in map(Path, options.files) if path.is_dir()])
    errors = sum(each.level == "error" for each in found)
    if not give_json(options.json, {"findings": [each._asdict() for each in found]}):
        return 1 if errors else 0
    for each in found:
        if each.level != "ok" or not options.problems:
            print(f"{each.level:5}  {each}")
    notes = sum(each.level == "note" for each in found)
    print(f"{count(len(found), 'finding')}: {count(errors, 'error')}, {count(notes, 'note')}")
    return 1 if errors else 0
