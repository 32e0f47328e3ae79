"""What `hmp COMMAND -h` prints, for the page of the command line."""

from __future__ import annotations

import contextlib
import io
import os
import re
from unittest import mock

from hmp import cli


def helps() -> dict[str, str]:
    """Return what -h prints, by command; of hmp itself under ""."""
    whole = _help()
    names = re.findall(r"^    ([\w-]+)", whole.partition("SUBCOMMAND\n")[2], re.MULTILINE)
    return {"": whole, **{name: _help(name) for name in names}}


def inserted() -> str:
    """Return a section for each command."""
    return "\n".join(f"## hmp {name}\n\n```text\n{printed}```\n" for name, printed in helps().items() if name)


def _help(*command: str) -> str:
    printed = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="96", NO_COLOR="1"), contextlib.redirect_stdout(printed):
        status = cli.main([*command, "-h"])
    if status != 0:
        raise RuntimeError(f"hmp {' '.join(command)} -h ended with {status}")
    return printed.getvalue()
