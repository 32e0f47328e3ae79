"""How subcommands print: in colour through rich on a terminal where rich is installed, plain text otherwise; and where they can write."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import hmp

__all__ = ["check_folder", "say"]

_consoles: dict[Any, Any] = {}


def say(text: str, style: str = "") -> None:
    """Print one line; piped output holds the text and nothing else."""
    stream = sys.stdout
    if not style or not stream.isatty() or importlib.util.find_spec("rich") is None:
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    if stream not in _consoles:
        _consoles[stream] = Console(file=stream, highlight=False, soft_wrap=True)
    _consoles[stream].print(Text(text, style=style))


def check_folder(file: str | Path | None, option: str = "") -> None:
    """HmpError, which begins with `option`, where `file` has no folder to be written to: better now than when the work is done."""
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise hmp.HmpError(f"{option}{file}: there is no such folder; make it first")
