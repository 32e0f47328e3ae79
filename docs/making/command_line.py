"""The page of the command line: what `hmp COMMAND -h` prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
from unittest import mock

from hmp import cli


def page() -> str:
    """The help of hmp and of each of its commands."""
    whole = _help()
    names = re.findall(r"^    ([\w-]+)", whole.partition("SUBCOMMAND\n")[2], re.MULTILINE)
    parts = ["# Command line\n\n`hmp` and `python -m hmp` are the same. What follows is what `-h` prints.\n", f"```text\n{whole}```\n"]
    parts += [f"## hmp {name}\n\n```text\n{_help(name)}```\n" for name in names]
    return "\n".join(parts)


def _help(*command: str) -> str:
    printed = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="96", NO_COLOR="1"), contextlib.redirect_stdout(printed):
        status = cli.main([*command, "-h"])
    if status != 0:
        raise RuntimeError(f"hmp {' '.join(command)} -h ended with {status}")
    return printed.getvalue()
