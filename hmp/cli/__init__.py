"""The command line: ``python -m hmp SUBCOMMAND`` and the console script ``hmp``.

A subcommand is one module (or package) of this package that has ``add(subparsers)``, which declares its
options, and ``run(options) -> int``. Nothing that imports torch is imported before ``run`` is called. An HmpError
that leaves ``run`` is wrong use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import hmp

from ..errors import is_interrupt
from . import benchmark, cast_weights, check, compare, demo, diff, doctor, explain, init, lists, run, summary, tune
from .output import check_folder, flush, is_closed_pipe
from .parser import Parser, parse

__all__ = [
    "main",
]

_SUBCOMMANDS = (demo, run, lists, check, explain, diff, init, compare, benchmark, tune, summary, cast_weights, doctor)
_WRONG_USE = 2
_INTERRUPTED = 130  # as a shell has it for a command that SIGINT ended
_NOBODY_READS = 141  # and that SIGPIPE did
_EXAMPLE = "hmp run --policy autocast train.py\nhmp COMMAND -h"


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of one command: 0 done, 1 the check failed, 2 wrong use, 130 after Ctrl-C, 141 into a pipe that is closed."""
    parser = _parser()
    try:
        options = parse(parser, argv)
    except SystemExit as stop:  # argparse leaves this way for --help (0) and for wrong use (2)
        status = stop.code if isinstance(stop.code, int) else _WRONG_USE
        return _status_of(lambda: status, parser.prog)
    if options.run is None:
        parser.print_help(sys.stderr)
        return _WRONG_USE
    command: Callable[[argparse.Namespace], int] = options.run
    if command is run.run:
        return command(options)  # a script under `hmp run` ends as python has it end
    return _status_of(lambda: _used(command, options), options.parser.prog)


def _used(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Return what the command returns; 2, and the error on stderr, for wrong use."""
    try:
        check_folder(getattr(options, "json", None), "--json")
        return command(options)
    except hmp.HmpError as error:
        print(f"{options.parser.prog}: {error}", file=sys.stderr)
        return _WRONG_USE


def _status_of(command: Callable[[], int], prog: str) -> int:
    """Return what the command returns, once its output is written; or how it was ended from outside."""
    try:
        status = command()
        flush()
    except BaseException as error:
        if is_closed_pipe(error):
            return _NOBODY_READS
        if not is_interrupt(error):
            raise
        print(f"{prog}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status


def _parser() -> Parser:
    parser = Parser(prog="hmp", description="Mixed precision for PyTorch, decided op by op from text files.", example=_EXAMPLE)
    parser.add_argument("--version", action="version", version=f"hmp {hmp.__version__}")
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", parser_class=Parser)
    for subcommand in _SUBCOMMANDS:
        subcommand.add(subparsers)
    for subcommand, subparser in zip(_SUBCOMMANDS, subparsers.choices.values(), strict=True):
        subparser.set_defaults(parser=subparser, run=subcommand.run)
    return parser
