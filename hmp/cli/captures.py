"""What ``hmp compare A B`` does with two captures, and how ``hmp run --capture`` writes one."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import hmp

from .output import check_page, give


def add_to_compare(parser: argparse.ArgumentParser) -> None:
    """Declare what says of two captures which modules and rows are the same."""
    parser.add_argument("other", metavar="CAPTURE", nargs="?", help="in the place of a recipe two files that hmp run --capture wrote")
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


def add_to_run(parser: argparse.ArgumentParser) -> None:
    """Declare what is captured."""
    parser.add_argument(
        "--capture",
        metavar="FILE",
        help="write what every module returned in the first call of each model, for hmp compare; ranks other than 0 write FILE.rank1 "
        "and so on",
    )
    parser.add_argument("--capture-calls", type=int, default=1, metavar="N", help="capture N calls of each model (default 1)")


def are_given(options: argparse.Namespace) -> bool:
    """Whether it is captures that are to be compared, and no recipe."""
    asked = any(getattr(options, name) is not None for name in ("other", "map", "row_a", "row_b"))
    return asked or options.recipe.endswith(".capture")


def compare(options: argparse.Namespace) -> int:
    """Prints how far two captures are apart. Return 0; HmpError where they are none, or have nothing in common."""
    if options.other is None:
        raise hmp.HmpError(f"{options.recipe}: two captures are compared, and one is given; give both: hmp compare A.capture B.capture")
    for name in ("policy", "against", "seed"):
        if getattr(options, name, None) != options.parser.get_default(name):
            raise hmp.HmpError(f"--{name} is for a recipe: what two captures were computed under stands in them; leave it out")
    if (options.row_a is None) != (options.row_b is None):
        raise hmp.HmpError("--row-a and --row-b name a pair; give both, or none, and the rows with the same tokens are found")
    check_page(options.html)
    rows = None if options.row_a is None else (options.row_a, options.row_b)
    give(options, hmp.compare_captures(options.recipe, options.other, map=options.map or (), rows=rows))
    return 0


def check(options: argparse.Namespace) -> None:
    """HmpError where the capture that is asked for could not be written: better now than when the script has run."""
    if options.capture is None:
        return
    if options.capture_calls < 1:
        raise hmp.HmpError(f"--capture-calls {options.capture_calls}: give a number from 1 on")
    from ..captures import file

    try:
        file.check(Path(options.capture))
    except (hmp.HmpError, ImportError) as error:
        raise hmp.HmpError(f"--capture: {error}") from None


@contextlib.contextmanager
def captured(target: str | None, calls: int) -> Iterator[None]:
    """Captures the first calls of every model while the script runs, where that is asked for; a line on stderr where none was called."""
    if target is None:
        yield
        return
    from ..captures.watching import NothingCalled

    try:
        with hmp.capture(target, calls=calls):
            yield
    except NothingCalled as error:
        print(f"hmp run: --capture {error}", file=sys.stderr)
