"""``hmp explain OP``: what a policy does with one op, and why."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import hmp

from .output import Parser, add_json, give_json


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "explain",
        example="hmp explain softmax --policy habana",
        help="explain what a policy does with an op",
        description="Prints the op's list, what hmp therefore does, its synonyms, and every name that it can be called by.",
    )
    parser.add_argument("op", metavar="OP", help="an op's name, as in list files")
    parser.add_argument("--policy", default="autocast", metavar="NAME", help="a preset's name or a folder of list files (default autocast)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, or 2 if there is no such op or policy."""
    rule = hmp.explain(options.op, hmp.Policy.load(options.policy))
    give_json(options.json, asdict(rule))
    print(rule)
    return 0
