"""``hmp diff A B``: what one policy does otherwise than another, op by op, or what ran otherwise in one recording than in another."""

from __future__ import annotations

import argparse
import json
import sys

import hmp

from ..formatting import count, dtype_name

__all__ = ["add", "run"]


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "diff",
        help="show the ops that two policies, or two recordings, treat differently",
        description="Prints each op that is on another list in policy B than in policy A; of two files that Report.to_json() wrote, each "
        "op that ran in other dtypes in B. Exit status 0 if there is none and the low dtype is the same, 1 if there is a difference.",
    )
    parser.add_argument("a", metavar="A", help="a preset's name, a folder of list files, or a report's JSON file")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Return 0 if the two policies are the same, 1 if they differ, 2 if one of them cannot be read."""
    if options.a.endswith(".json") and options.b.endswith(".json"):
        return _of_reports(options)
    try:
        one, other = hmp.Policy.load(options.a), hmp.Policy.load(options.b)
    except hmp.HmpError as error:
        print(f"hmp diff: {error}", file=sys.stderr)
        return 2
    changes = {name: (here or "unlisted", there or "unlisted") for name, (here, there) in one.diff(other).items()}
    if one.dtype is not other.dtype:
        changes = {"(low dtype)": (dtype_name(one.dtype), dtype_name(other.dtype)), **changes}
    if options.json:
        print(json.dumps(changes, indent=1))
        return 1 if changes else 0
    if not changes:
        print(f"{_called(options.a, one)} and {_called(options.b, other)} are the same")
        return 0
    print(f"{_called(options.a, one)} -> {_called(options.b, other)}: {count(len(changes), 'difference')}")
    width = max(map(len, changes))
    for name, (here, there) in changes.items():
        print(f"  {name:{width}}  {here:8} -> {there}")
    return 1


def _of_reports(options: argparse.Namespace) -> int:
    try:
        changes = hmp.Report.load(options.a).diff(hmp.Report.load(options.b))
    except hmp.HmpError as error:
        print(f"hmp diff: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(changes, indent=1))
    elif changes:
        print(f"{options.a} -> {options.b}: {len(changes)} ops ran otherwise", *changes, sep="\n  ")
    else:
        print(f"every op ran in {options.b} as in {options.a}")
    return 1 if changes else 0


def _called(given: str, policy: hmp.Policy) -> str:
    """The name as it was given, and the preset that it stands for."""
    return f"{given} ({policy.name})" if given in hmp.policies() and given != policy.name else given
