"""The command line: ``python -m hmp SUBCOMMAND`` and the console script ``hmp``.

A subcommand is one module (or package) of this package that has ``add(subparsers)``, which declares its
options and sets its ``run(options) -> int`` as the default for ``run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import benchmark, check, compare, demo, diff, explain, init, lists, run, tune

__all__ = [
    "main",
]

_SUBCOMMANDS = (demo, run, lists, check, explain, diff, init, compare, benchmark, tune)
_WRONG_USE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of one command: 0 done, 1 the check failed, 2 wrong use."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse leaves this way for --help (0) and for wrong use (2)
        return stop.code if isinstance(stop.code, int) else _WRONG_USE
    if options.run is None:
        parser.print_help(sys.stderr)
        return _WRONG_USE
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hmp", description="Mixed precision for PyTorch, decided op by op from text files.")
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for subcommand in _SUBCOMMANDS:
        subcommand.add(subparsers)
    return parser
