"""``hmp diff A B``: what is otherwise in B than in A, of two policies, two reports or two captures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import hmp

from .output import Parser, add_json, check_page, give, give_json


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "diff",
        example="hmp diff habana autocast\nhmp diff before.json after.json\nhmp diff trainer.capture server.capture",
        help="compare two policies, two reports or two captures",
        description="Of two policies, prints the ops that are on different lists. Of two reports (files that Report.to_json() wrote), "
        "prints the ops that ran in different dtypes. Of two captures (files that hmp run --capture wrote), prints the first module whose "
        "outputs differ, how the difference grows with depth, and the dtypes that each program computed in. Exit status 0 if nothing "
        "differs, 1 if something does, 2 for wrong use.",
    )
    parser.add_argument("a", metavar="A", help="a preset's name, a folder of list files, a report's JSON file, or a capture")
    parser.add_argument("b", metavar="B", help="what to compare A with, of the same kind")
    parser.add_argument(
        "--map",
        action="append",
        metavar="A=B",
        help="for captures: modules called A in the first are called B in the second; * matches any text; may be repeated",
    )
    parser.add_argument("--html", metavar="FILE", help="for captures: also write an HTML page")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0 if the two are the same, 1 if they differ, 2 if one of them cannot be read."""
    kind, other = _kind(options.a), _kind(options.b)
    if kind != other:
        raise hmp.HmpError(f"expected two policies, two reports or two captures, got a {kind}, {options.a}, and a {other}, {options.b}")
    if kind == "capture":
        check_page(options.html)
        result = hmp.compare_captures(options.a, options.b, map=options.map or ())
        give(options, result)
        return 1 if result.first is not None else 0
    for name in ("map", "html"):
        if getattr(options, name) is not None:
            raise hmp.HmpError(f"--{name} is for captures only; leave it out")
    from ..tools.formatting import aligned, count

    changes: Any
    if kind == "report":
        changes = lines = hmp.types.Report.load(options.a).diff(hmp.types.Report.load(options.b))
    else:
        found = hmp.Policy.load(options.a).diff(hmp.Policy.load(options.b))
        changes = {name: (here or "unlisted", there or "unlisted") for name, (here, there) in found.items()}
        lines = aligned([(name, here, f"-> {there}") for name, (here, there) in changes.items()], (0, 1, 2))
    give_json(options.json, {"changes": changes})
    print(f"{options.a} -> {options.b}: {count(len(changes), 'difference')}", *lines, sep="\n  ")
    return 1 if changes else 0


def _kind(name: str) -> str:
    if name.endswith(".json"):
        return "report"
    is_capture = name.endswith(".capture") or (Path(name).is_file() and not name.endswith(".txt"))  # a list file gets a policy's error
    return "capture" if is_capture else "policy"
