"""The result as lines of text."""

from __future__ import annotations

from ...core.formatting import NOTHING, aligned, count, duration, size
from .result import Benchmark, BenchmarkRow


def table(result: Benchmark) -> str:
    """A heading, a line for each policy, and the notes."""
    headings = ["policy", "step time", "spread", f"vs {result.baseline}", result.memory_kind]
    if result.losses_compare:
        headings += ["loss, step 1", f"step {result.untimed_steps + result.steps}"]
    cells = [[row.name, *_numbers(row, result.losses_compare)] for row in result.rows if row.error is None]
    names = max(len(heading) for heading in (headings[0], *(row.name for row in result.rows)))
    headings[0] = headings[0].ljust(names)  # also those of policies that failed, which have no cells
    heading, rule, *body = aligned([headings, *cells], ruled=True)
    numbers = iter(body)
    lines = [_heading(result), "", heading, rule]
    lines += [next(numbers) if row.error is None else f"{row.name:{names}}  {row.error}" for row in result.rows]
    return "\n".join([*lines, *([""] if result.notes else []), *result.notes])


def _heading(result: Benchmark) -> str:
    threads = f", {count(result.threads, 'thread')}" if result.device == "cpu" else ""
    return (
        f"hmp benchmark: {result.device}, torch {result.torch}{threads}; medians of {count(result.rounds, 'round')}, "
        f"{count(result.steps, 'timed step')} a policy in each"
    )


def _numbers(row: BenchmarkRow, losses: bool) -> list[str]:
    spread = NOTHING if row.seconds is None or row.spread is None else f"{100 * row.spread / (row.seconds or 1):.1f} %"
    cells = [
        NOTHING if row.seconds is None else duration(row.seconds, none="0 us"),
        spread,
        NOTHING if row.ratio is None else f"{row.ratio:.2f}",
        NOTHING if row.memory is None else size(row.memory, none="0 B"),
    ]
    return [*cells, _loss(row.first_loss), _loss(row.last_loss)] if losses else cells


def _loss(loss: float | None) -> str:
    return NOTHING if loss is None else f"{loss:.5g}"
