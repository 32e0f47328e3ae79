"""``hmp diff A B``: what one policy does otherwise than another, op by op, or what ran otherwise in one recording than in another."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

import hmp

from .output import add_json, give_json
from .parser import Parser

_SHORT = 20  # so many differences are seen at a glance
# How many bits each list leaves an op; of an op on neither of these, its inputs decide.
_BITS = {"fp8": 8, "saved": 8, "bf16": 16, "promote": 24, "unlisted": 24, "fp32": 32}
# An op is of the first family whose pattern is found in its name.
_FAMILIES = {
    "losses": r"loss|entropy|kl_div",
    "convolutions": r"conv",
    "pooling": r"pool",
    "norms": r"norm(?!al)",
    "recurrent nets": r"lstm|gru|rnn",
    "spectra": r"fft|stft",
    "products": r"mm|mv$|matmul|linear|dot|einsum|addr$|^ger$|outer|kron|multi_head|attention",
    "linear algebra": r"linalg|cholesky|svd|qr|inverse|pinv|pca|lu_|^lu$",
    "other ops": "",
}


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "diff",
        example="hmp diff habana autocast\nhmp diff before.json after.json",
        help="show the ops that two policies, or two recordings, treat differently",
        description="Prints each op that is on another list in policy B than in policy A; of two files that Report.to_json() wrote, each "
        "op that ran in other dtypes in B. Exit status 0 if there is none, and low dtype and recipes are the same, else 1.",
    )
    parser.add_argument("a", metavar="A", help="a preset's name, a folder of list files, or a report's JSON file")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--summary", action="store_true", help="of two policies, print how many ops of each family change, not which")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0 if the two policies are the same, 1 if they differ, 2 if one of them cannot be read."""
    from ..formatting import count

    if options.a.endswith(".json") and options.b.endswith(".json"):
        return _of_reports(options)
    one, other = hmp.Policy.load(options.a), hmp.Policy.load(options.b)
    changes = {name: (here or "unlisted", there or "unlisted") for name, (here, there) in one.diff(other).items()}
    ops = {what: change for what, change in changes.items() if not what.startswith("(")}
    if not give_json(options.json, {"changes": changes}):
        return 1 if changes else 0
    if not changes:
        print(f"{_called(options.a, one)} and {_called(options.b, other)} decide every op alike")
        return 0
    print(f"{_called(options.a, one)} -> {_called(options.b, other)}: {count(len(changes), 'difference')}")
    if options.summary or len(ops) > _SHORT:
        print(*_summed_up(ops), sep="\n")
    if options.summary:
        changes = {what: change for what, change in changes.items() if what not in ops}
    width = max(map(len, changes), default=0)
    for name, (here, there) in changes.items():
        print(f"  {name:{width}}  {here:8} -> {there}")
    return 1


def _summed_up(changes: Mapping[str, tuple[str, str]]) -> list[str]:
    """A table of how many ops of each family go to fewer bits, to more, and to as many; no lines without changes."""
    from ..formatting import aligned

    found: dict[str, list[int]] = {}
    for name, (here, there) in changes.items():
        family = next(family for family, pattern in _FAMILIES.items() if re.search(pattern, name))
        more = _BITS[there] - _BITS[here]
        found.setdefault(family, [0, 0, 0])[0 if more < 0 else 1 if more else 2] += 1
    rows = [(family, *map(str, found[family])) for family in _FAMILIES if family in found]
    total = [str(sum(column)) for column in zip(*found.values(), strict=True)]
    table = [("", "lower", "higher", "left to inputs"), *rows, ("all", *total)] if rows else []
    return [f"  {line}" for line in aligned(table)] if table else []


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
    """The name as it was given, and the preset that it stands for."""
    return f"{given} ({policy.name})" if given in hmp.policies() and given != policy.name else given
