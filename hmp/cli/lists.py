"""``hmp lists``: the presets, with the lengths of their lists."""

from __future__ import annotations

import argparse

import hmp

from .output import Parser, add_json, give_json


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "lists",
        example="hmp lists",
        help="show the presets",
        description="Prints a line for each preset: its low-precision dtype, and how many ops are on each of its lists. hmp check PRESET "
        "explains the entries.",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0."""
    from ..core.casting import dtype_name
    from ..core.lists import kinds

    names = hmp.policies()
    give_json(options.json, {"policies": {name: hmp.Policy.load(name).to_dict() for name in names}})
    width = max(map(len, names))
    lists = sorted((kind for kind in kinds()), key=lambda kind: (kind.is_optional, kind.adds))
    print(f"{'preset':{width}}  dtype      {'  '.join(f'{kind.name:>4}' for kind in lists)}")
    for name in names:
        policy = hmp.Policy.load(name)
        if policy.name != name:
            print(f"{name:{width}}  the same as {policy.name} on this machine")
            continue
        lengths = (f"{len(getattr(policy, kind.name)):{max(4, len(kind.name))}}" for kind in lists)
        print(f"{name:{width}}  {dtype_name(policy.dtype):9}", *lengths, sep="  ")
    return 0
