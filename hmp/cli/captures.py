"""What ``hmp diff A B`` does with two captures, and how ``hmp run --capture`` writes one."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import hmp

from .output import check_page, give


def add_to_diff(parser: argparse.ArgumentParser) -> None:
    """Declare what says of two captures which modules and rows are the same."""
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


def add_to_run(parser: argparse.ArgumentParser) -> None:
    """Declare what is captured."""
    parser.add_argument(
        "--capture",
        metavar="FILE",
        help="write what every module returned in the first call of each model, for hmp diff; ranks other than 0 write FILE.rank1 "
        "and so on",
    )
    parser.add_argument("--capture-calls", type=int, default=1, metavar="N", help="capture N calls of each model (default 1)")


def diff(options: argparse.Namespace) -> int:
    """Print how far two captures are apart. Return 0, or 1 where they part; raise HmpError where they have nothing in common."""
    if (options.row_a is None) != (options.row_b is None):
        raise hmp.HmpError("--row-a and --row-b name a pair; give both, or none, and the rows with the same tokens are found")
    check_page(options.html)
    rows = None if options.row_a is None else (options.row_a, options.row_b)
    result = hmp.compare_captures(options.a, options.b, map=options.map or (), rows=rows)
    give(options, result)
    return 1 if result.first is not None else 0


def check(options: argparse.Namespace) -> None:
    """Raise HmpError where the capture that is asked for could not be written: better now than when the script has run."""
    if options.capture is None:
        return
    if options.capture_calls < 1:
        raise hmp.HmpError(f"--capture-calls {options.capture_calls}: give a number from 1 on")
    from ..tools.traces import file

    try:
        file.check(Path(options.capture))
    except (hmp.HmpError, ImportError) as error:
        raise hmp.HmpError(f"--capture: {error}") from None


@contextlib.contextmanager
def captured(target: str | None, calls: int) -> Iterator[None]:
    """Capture the first calls of every model while the script runs, where that is asked for; a line on stderr where none was called."""
    if target is None:
        yield
        return
    from ..tools.traces.capture import NothingCalled

    try:
        with hmp.capture(target, calls=calls):
            yield
    except NothingCalled as error:
        print(f"hmp run: --capture {error}", file=sys.stderr)
