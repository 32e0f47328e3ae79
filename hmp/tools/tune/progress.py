"""How far a search is: a bar of tqdm's where that is installed and stderr is a terminal, lines of text elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from ...errors import HmpError
from ..extras import lacking


class Progress:
    """Shows stages and trials on stderr: for True, and for None if stderr is a terminal."""

    def __init__(self, progress: bool | None) -> None:
        if not (progress is None or isinstance(progress, bool)):
            raise HmpError(f"invalid progress={progress!r}: expected True, False or None")
        stderr = sys.stderr  # None under pythonw
        is_terminal = stderr is not None and stderr.isatty()
        self._is_shown = stderr is not None and (is_terminal if progress is None else progress)
        self._bar: Any = None
        if self._is_shown and is_terminal and not lacking("tune", "tqdm"):
            from tqdm import tqdm

            self._bar = tqdm(desc="hmp tune", file=stderr, leave=False, unit="trial", dynamic_ncols=True)

    def stage(self, text: str) -> None:
        """A stage begins."""
        if self._bar is not None:
            self._bar.set_description(f"hmp tune: {text}")
        else:
            self._say(text)

    def step(self, done: int, total: int, best: str) -> None:
        """Of about `total` trials, `done` are made."""
        if self._bar is not None:
            self._bar.n, self._bar.total = done, total
            self._bar.set_postfix_str(best)
        else:
            self._say(f"{done} of about {total}" + (f": {best}" if best else ""))

    def close(self) -> None:
        """The search has ended."""
        if self._bar is not None:
            self._bar.close()

    def _say(self, text: str) -> None:
        if self._is_shown:
            print(f"hmp tune: {text}", file=sys.stderr, flush=True)
