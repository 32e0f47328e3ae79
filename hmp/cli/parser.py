"""The parser of the command line: a wrong option is answered by the command that it was given to."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends in an example."""

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        if example:
            kwargs["epilog"] = "example:\n" + textwrap.indent(example, "  ")
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError for what is not among the choices; it says which one is nearly that."""
        near = difflib.get_close_matches(str(value), action.choices or (), n=1)
        if near and value not in (action.choices or ()):
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; did you mean {near[0]!r}?")
        super()._check_value(action, value)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the description, and leaves the lines of the example as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("example:\n"):
            return textwrap.indent(text, indent)
        return textwrap.fill(" ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent)


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; what no command knows is the error of the command that was chosen."""
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        (options.parser if options.run is not None else parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    return options
