"""``hmp lists``: the presets, with the lengths of their lists."""

from __future__ import annotations

import argparse

import hmp

from .output import add_json, give_json
from .parser import Parser


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
    from ..core.formatting import dtype_name

    names = hmp.policies()
    if not give_json(options.json, {"policies": {name: hmp.Policy.load(name).to_dict() for name in names}}):
        return 0
    width = max(map(len, names))
    print(f"{'preset':{width}}  dtype      bf16  fp32  promote  fp8  saved")
    for name in names:
        policy = hmp.Policy.load(name)
        if policy.name != name:
            print(f"{name:{width}}  the same as {policy.name} on this machine")
            continue
        lengths = zip((4, 4, 7, 3, 5), (policy.bf16, policy.fp32, policy.promote, policy.fp8, policy.saved), strict=True)
        print(f"{name:{width}}  {dtype_name(policy.dtype):9}", *(f"{len(each):{wide}}" for wide, each in lengths), sep="  ")
    return 0
