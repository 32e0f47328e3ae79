"""How far a search is: what is told of it, and the bar that shows it where rich is installed."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Is told what the search does."""

    def stage(self, text: str) -> None:
        """A new stage began, such as "measuring ops"."""

    def step(self, done: int, total: int, best: str) -> None:
        """`done` of about `total` evaluations are made; `best` is a line about the best lists so far."""

    def close(self) -> None:
        """The search ended."""
