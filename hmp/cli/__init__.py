"""The command line: ``python -m hmp SUBCOMMAND`` and the console script ``hmp``.

A subcommand is one module (or package) of this package that has ``add(subparsers)``, which declares its
options, and ``run(options) -> int``. Nothing that imports torch is imported before ``run`` is called. An HmpError
that leaves ``run`` is wrong use.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import hmp

from ..errors import is_interrupt
from . import benchmark, cast_weights, check, compare, demo, diff, doctor, explain, init, lists, run, summary, tune
from .output import Parser, check_folder, is_closed_pipe

__all__ = ["main"]

_SUBCOMMANDS = (demo, run, lists, check, explain, diff, init, compare, benchmark, tune, summary, cast_weights, doctor)
_WRONG_USE = 2
_INTERRUPTED = 130  # as a shell has it for a command that SIGINT ended
_NOBODY_READS = 141  # and that SIGPIPE did
_EXAMPLE = "hmp run --policy autocast train.py\nhmp COMMAND -h"


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of one command: 0 done, 1 the check failed, 2 wrong use, 130 after Ctrl-C, 141 into a pipe that is closed."""
    parser = _parser()
    try:
        options, unknown = parser.parse_known_args(argv)
        if unknown:  # an error of the command that was given
            (parser if options.run is None else options.parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as stop:  # argparse leaves this way for --help (0) and for wrong use (2)
        return int(stop.code or 0)
    if options.run is None:
        parser.print_help(sys.stderr)
        return _WRONG_USE
    if options.run == run.run:
        return run.run(options)  # a script under `hmp run` ends as python has it end
    try:
        check_folder(getattr(options, "json", None), "--json")
        status: int = options.run(options)
        if sys.stdout is not None:  # as under pythonw
            sys.stdout.flush()  # raises if nobody reads any more, as after `| head -1`
    except hmp.HmpError as error:
        print(f"{options.parser.prog}: {error}", file=sys.stderr)
        return _WRONG_USE
    except BaseException as error:
        if is_closed_pipe(error):
            return _NOBODY_READS
        if not is_interrupt(error):
            raise
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
    for subcommand, subparser in zip(_SUBCOMMANDS, subparsers.choices.values(), strict=True):
        subparser.set_defaults(parser=subparser, run=subcommand.run)
    return parser
