"""What subcommands share: their parser, what they print, and where they can write."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hmp

from ..errors import to_install
from ..tools.extras import lacking


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends in an example."""

    def __init__(self, *, example: str, description: str, **kwargs: Any) -> None:
        description = textwrap.fill(description, shutil.get_terminal_size().columns - 2)  # as argparse does
        epilog = "example:\n" + textwrap.indent(example, "  ")
        # which keeps the lines of the example
        super().__init__(description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError for what is not among the choices; it says which one is nearly that."""
        near = difflib.get_close_matches(str(value), action.choices or (), n=1)
        if near and value not in (action.choices or ()):
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; did you mean {near[0]!r}?")
        super()._check_value(action, value)


def is_closed_pipe(error: BaseException) -> bool:
    """Return True if a command printed what nobody reads any more; standard output leads nowhere then, so that python can flush it."""
    if not isinstance(error, BrokenPipeError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not frame.f_globals["__name__"].startswith(__package__):
        return False  # a pipe of a recipe's
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def check_folder(file: str | None, option: str) -> None:
    """Raise HmpError if the file that the option names could not be written: better now than when the work is done."""
    if file is None:
        return
    path = Path(file).absolute()
    if not path.parent.is_dir():
        raise hmp.HmpError(f"{option} {file}: the folder does not exist; create it first")
    if path.is_dir():
        raise hmp.HmpError(f"{option} {file}: expected a file to write, got a folder; give a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise hmp.HmpError(f"{option} {file}: it may not be written; give a file in a folder that can be written to")


def check_page(file: str | None, option: str = "--html", *packages: str) -> None:
    """Raise HmpError if the page that the option asks for could not be made: it needs these packages of the extra, by default all."""
    check_folder(file, option)
    if file is not None and (lacks := lacking("report", *packages)):
        raise hmp.HmpError(f"{option} needs {lacks}: {to_install('report')}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare --json, which means the same for every subcommand."""
    parser.add_argument("--json", type=_json_file, metavar="FILE", help="also write the result as JSON to FILE, whose name ends in .json")


def _json_file(text: str) -> str:
    """Return the name of a file for JSON: anything else may be one of the user's lists, which must not be written over."""
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text}: expected a file that ends in .json")
    return text


def give_json(file: str | None, values: Mapping[str, Any]) -> None:
    """Write `values` where --json asks for them."""
    if file is not None:
        from ..tools.formatting import json_written

        json_written(file, lambda: values)


def give(options: argparse.Namespace, result: Any) -> None:
    """Print a result, write it where --json asks for it, and its page where --html does."""
    print(result)
    give_json(options.json, result.to_dict())
    if getattr(options, "html", None) is not None:
        result.to_html(options.html)
