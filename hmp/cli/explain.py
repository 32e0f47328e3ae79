"""``hmp explain OP``: what a policy does with one op, and why."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import hmp

__all__ = ["add", "run"]


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "explain",
        help="say what a policy does with an op, and why",
        description="Prints the list that the op is on, why, its synonyms, and every place where it can be called.",
    )
    parser.add_argument("op", metavar="OP", help="a name as list files spell it")
    parser.add_argument("--policy", default="autocast", metavar="NAME", help="a preset's name or a folder of list files (default autocast)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Return 0, or 2 if there is no such op or policy."""
    try:
        rule = hmp.explain(options.op, hmp.Policy.load(options.policy))
    except hmp.HmpError as error:
        print(f"hmp explain: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(rule), indent=1) if options.json else rule)
    return 0
