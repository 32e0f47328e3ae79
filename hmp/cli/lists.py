"""``hmp lists [POLICY]``: the presets that there are, the lists of one policy, or those of the installed torch's autocast."""

from __future__ import annotations

import argparse

import hmp

from .output import add_json, give_json
from .parser import Parser


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "lists",
        example="hmp lists\nhmp lists habana\nhmp lists torch-cuda --ask my_lists",
        help="show the presets, or the lists of one policy",
        description="Prints a line for each preset, with its low dtype and the lengths of its lists; with a policy, its lists. With --ask "
        "writes into a folder what the installed torch's own autocast casts on a device, which torch itself is asked.",
    )
    parser.add_argument("policy", metavar="POLICY", nargs="?", help="a preset's name or a folder of list files")
    parser.add_argument("--ask", metavar="FOLDER", help="of torch-DEVICE, such as torch-cuda: write the installed torch's lists there")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, or 2 if the policy cannot be read or asked for."""
    if options.ask is not None:
        from ..lists import asking

        print(hmp.Policy.load(asking.write(options.policy or "", options.ask)))
        return 0
    if options.policy is None:
        if give_json(options.json, {"policies": {name: hmp.Policy.load(name).to_dict() for name in hmp.policies()}}):
            _presets()
        return 0
    policy = hmp.Policy.load(options.policy)
    if not give_json(options.json, policy.to_dict()):
        return 0
    print(policy)
    for cast in policy.lists:
        print(f"\n{cast}:", *policy.entries(cast), sep="\n  ")
    return 0


def _presets() -> None:
    from ..formatting import dtype_name

    names = hmp.policies()
    width = max(map(len, names))
    print(f"{'preset':{width}}  low dtype  bf16  fp32  promote  fp8  saved")
    for name in names:
        policy = hmp.Policy.load(name)
        if policy.name != name:
            print(f"{name:{width}}  is {policy.name} here")
            continue
        low = dtype_name(policy.dtype)
        lengths = zip((4, 4, 7, 3, 5), (policy.bf16, policy.fp32, policy.promote, policy.fp8, policy.saved), strict=True)
        print(f"{name:{width}}  {low:9}", *(f"{len(each):{wide}}" for wide, each in lengths), sep="  ")
