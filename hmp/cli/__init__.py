"""The command line: ``python -m hmp SUBCOMMAND`` and the console script ``hmp``.

A subcommand is one module (or package) of this package that has ``add(subparsers)``, which declares its
options and sets its ``run(options) -> int`` as the default for ``run``. Nothing that imports torch is imported
before ``run`` is called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import hmp

from ..errors import is_interrupt
from . import benchmark, check, compare, demo, diff, doctor, explain, init, lists, run, summary, tune
from .parser import Parser, parse

__all__ = [
    "main",
]

_SUBCOMMANDS = (demo, run, lists, check, explain, diff, init, compare, benchmark, tune, summary, doctor)
_WRONG_USE = 2
_INTERRUPTED = 130  # as a shell has it for a command that SIGINT ended
_EXAMPLE = "hmp run --policy autocast train.py\nhmp COMMAND -h"


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of one command: 0 done, 1 the check failed, 2 wrong use, 130 after Ctrl-C."""
    parser = _parser()
    try:
        options = parse(parser, argv)
    except SystemExit as stop:  # argparse leaves this way for --help (0) and for wrong use (2)
        return stop.code if isinstance(stop.code, int) else _WRONG_USE
    if options.run is None:
        parser.print_help(sys.stderr)
        return _WRONG_USE
    try:
        status: int = options.run(options)
    except BaseException as error:
        if options.run is run.run or not is_interrupt(error):
            raise  # a script under `hmp run` ends as python has it end
        print(f"{options.parser.prog}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status


def _parser() -> Parser:
    parser = Parser(prog="hmp", description="Mixed precision for PyTorch, decided op by op from text files.", example=_EXAMPLE)
    parser.add_argument("--version", action="version", version=f"hmp {hmp.__version__}")
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", parser_class=Parser)
    for subcommand in _SUBCOMMANDS:
        subcommand.add(subparsers)
    for subparser in subparsers.choices.values():
        subparser.set_defaults(parser=subparser)
    return parser
