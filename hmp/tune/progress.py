"""How far a search is: what is told of it, as a bar where rich is installed, as lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from ..errors import HmpError
from ..extras import lacking


class Progress(Protocol):
    """Is told what the search does."""

    def stage(self, text: str) -> None:
        """A new stage began, such as "measuring ops"."""

    def step(self, done: int, total: int, best: str) -> None:
        """`done` of about `total` evaluations are made; `best` is a line about the best lists so far."""

    def close(self) -> None:
        """The search ended."""


def shown(progress: bool | Progress | None) -> Progress:
    """What tells the user: a bar or lines on stderr for True, nothing for False, for None a bar or lines if stderr is a terminal.

    An object with the methods of Progress is taken as it is; HmpError for anything else.
    """
    if isinstance(progress, bool) or progress is None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        if sys.stderr is None or not (is_terminal if progress is None else progress):
            return Silent()
        return Bar() if is_terminal and not lacking("tune", "rich") else Lines()
    if not all(callable(getattr(progress, name, None)) for name in ("stage", "step", "close")):
        raise HmpError(f"progress={progress!r} is none; give True, False, None or an object with the methods stage, step and close")
    return progress


class Silent:
    """Says nothing."""

    def stage(self, text: str) -> None:
        """Nothing."""

    def step(self, done: int, total: int, best: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """A line on stderr for each thing that is told."""

    def stage(self, text: str) -> None:
        """The stage."""
        self._say(text)

    def step(self, done: int, total: int, best: str) -> None:
        """How far it is, and the best so far."""
        self._say(f"{done} of about {max(done, total)}" + (f": {best}" if best else ""))

    def close(self) -> None:
        """Nothing: every line is ended."""

    def _say(self, text: str) -> None:
        print(f"hmp tune: {text}", file=sys.stderr, flush=True)


class Bar:
    """A bar of rich's on stderr, with the time that is left."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console

        columns: list[Any] = [
            progress.TextColumn("hmp tune: {task.fields[stage]}", markup=False),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[count]}", markup=False),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("{task.fields[best]}", markup=False),
        ]
        # what the model prints stays its own: a bar that took over stdout would put it on stderr
        self._bar = progress.Progress(*columns, console=Console(file=sys.stderr), transient=True, redirect_stdout=False)
        self._task = self._bar.add_task("", total=None, stage="starting", count="", best="")
        self._bar.start()

    def stage(self, text: str) -> None:
        """The stage, before the bar."""
        self._bar.update(self._task, stage=text)

    def step(self, done: int, total: int, best: str) -> None:
        """How far it is, in the bar, and the best so far behind it."""
        total = max(done, total)
        self._bar.update(self._task, completed=done, total=total, count=f"{done} of about {total}", best=best)

    def close(self) -> None:
        """The bar goes away."""
        self._bar.stop()
