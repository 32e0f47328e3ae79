"""The result as lines of text."""

from __future__ import annotations

from ..units import duration, size
from .result import Benchmark, Row

_NOTHING = "-"


def table(result: Benchmark) -> str:
    """A heading, a line for each policy, and the notes."""
    headings = ["policy", "step time", "spread", f"vs {result.baseline}", result.memory_kind]
    if result.losses_compare:
        headings += ["loss, step 1", f"step {result.untimed_steps + result.steps}"]
    cells = [[row.name, *_numbers(row, result.losses_compare)] for row in result.rows if row.error is None]
    names = max(len(heading) for heading in (headings[0], *(row.name for row in result.rows)))
    widths = [names, *(max(map(len, column)) for column in list(zip(headings, *cells, strict=True))[1:])]
    lines = [_heading(result), "", _line(headings, widths), "-" * (sum(widths) + 2 * len(widths) - 2)]
    numbers = iter(cells)
    lines += [_line(next(numbers), widths) if row.error is None else f"{row.name:{names}}  {row.error}" for row in result.rows]
    return "\n".join([*lines, *([""] if result.notes else []), *result.notes])


def _heading(result: Benchmark) -> str:
    threads = f", {_count(result.threads, 'thread')}" if result.device == "cpu" else ""
    return (
        f"hmp benchmark: {result.device}, torch {result.torch}{threads}; medians of {_count(result.rounds, 'round')}, "
        f"{_count(result.steps, 'timed step')} a policy in each"
    )


def _numbers(row: Row, losses: bool) -> list[str]:
    spread = _NOTHING if row.seconds is None or row.spread is None else f"{100 * row.spread / (row.seconds or 1):.1f} %"
    cells = [
        _NOTHING if row.seconds is None else duration(row.seconds),
        spread,
        _NOTHING if row.ratio is None else f"{row.ratio:.2f}",
        _NOTHING if row.memory is None else size(row.memory),
    ]
    return [*cells, _loss(row.first_loss), _loss(row.last_loss)] if losses else cells


def _line(cells: list[str], widths: list[int]) -> str:
    first, *rest = (f"{cell:{'>' if index else '<'}{width}}" for index, (cell, width) in enumerate(zip(cells, widths, strict=True)))
    return "  ".join([first, *rest]).rstrip()


def _loss(loss: float | None) -> str:
    return _NOTHING if loss is None else f"{loss:.5g}"


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"
