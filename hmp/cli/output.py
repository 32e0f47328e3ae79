"""How subcommands print: in colour through rich on a terminal where rich is installed, plain text otherwise."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

__all__ = ["say"]

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
