"""``hmp diff A B``: what is otherwise in B than in A, of two policies, two reports or two captures."""

from __future__ import annotations

import argparse
from pathlib import Path

import hmp

from .output import add_json, check_page, give, give_json
from .parser import Parser


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "diff",
        example="hmp diff habana autocast\nhmp diff before.json after.json\nhmp diff trainer.capture server.capture",
        help="show what two policies, two reports or two captures differ in",
        description="Prints each op that is on another list in policy B than in policy A; of two files that Report.to_json() wrote, each "
        "op that ran in other dtypes in B; of two that hmp run --capture wrote, where the programs part first, how the gap grows with "
        "depth, and what each computed in. Exit status 0 if nothing differs, else 1.",
    )
    parser.add_argument("a", metavar="A", help="a preset's name, a folder of list files, a report's JSON file, or a capture")
    parser.add_argument("b", metavar="B", help="another one of the same kind")
    parser.add_argument(
        "--map",
        action="append",
        metavar="A=B",
        help="of two captures: modules called A in the first are B in the second; * stands for any text, and the option may be repeated",
    )
    parser.add_argument("--row-a", type=int, metavar="N", help="of two captures: which row of the first one's batch, counted from 0 ...")
    parser.add_argument(
        "--row-b", type=int, metavar="N", help="... stands beside which of the second's; else the rows with the same tokens"
    )
    parser.add_argument("--html", metavar="FILE", help="of two captures: also write a page")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0 if the two are the same, 1 if they differ, 2 if one of them cannot be read."""
    kind, other = _kind(options.a), _kind(options.b)
    if kind != other:
        raise hmp.HmpError(f"expected two of a kind, got a {kind}, {options.a}, and a {other}, {options.b}")
    if kind == "capture":
        return _of_captures(options)
    for name in ("map", "row_a", "row_b", "html"):
        if getattr(options, name) is not None:
            raise hmp.HmpError(f"--{name.replace('_', '-')} is for two captures; leave it out for a {kind}")
    return _of_policies(options) if kind == "policy" else _of_reports(options)


def _kind(name: str) -> str:
    if name.endswith(".json"):
        return "report"
    return "capture" if name.endswith(".capture") or Path(name).is_file() else "policy"


def _of_captures(options: argparse.Namespace) -> int:
    """Print how far two captures are apart. Return 0, or 1 where they part; raise HmpError where they have nothing in common."""
    if (options.row_a is None) != (options.row_b is None):
        raise hmp.HmpError("--row-a and --row-b name a pair; give both, or none, and the rows with the same tokens are found")
    check_page(options.html)
    rows = None if options.row_a is None else (options.row_a, options.row_b)
    result = hmp.compare_captures(options.a, options.b, map=options.map or (), rows=rows)
    give(options, result)
    return 1 if result.first is not None else 0


def _of_policies(options: argparse.Namespace) -> int:
    from ..core.formatting import count

    one, other = hmp.Policy.load(options.a), hmp.Policy.load(options.b)
    changes = {name: (here or "unlisted", there or "unlisted") for name, (here, there) in one.diff(other).items()}
    if not give_json(options.json, {"changes": changes}):
        return 1 if changes else 0
    if not changes:
        print(f"{_called(options.a, one)} and {_called(options.b, other)} decide every op alike")
        return 0
    print(f"{_called(options.a, one)} -> {_called(options.b, other)}: {count(len(changes), 'difference')}")
    width = max(map(len, changes))
    for name, (here, there) in changes.items():
        print(f"  {name:{width}}  {here:8} -> {there}")
    return 1


def _of_reports(options: argparse.Namespace) -> int:
    changes = hmp.Report.load(options.a).diff(hmp.Report.load(options.b))
    if not give_json(options.json, {"changes": changes}):
        return 1 if changes else 0
    if changes:
        print(f"{options.a} -> {options.b}: {len(changes)} ops ran otherwise", *changes, sep="\n  ")
    else:
        print(f"every op ran in {options.b} as in {options.a}")
    return 1 if changes else 0


def _called(given: str, policy: hmp.Policy) -> str:
    """Return the name as it was given, and the preset that it stands for."""
    return f"{given} ({policy.name})" if given in hmp.policies() and given != policy.name else given
