"""What a benchmark found: one BenchmarkRow for each policy, as values, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.formatting import NOTHING, aligned, count, duration, json_values, json_written, size, versioned
from ...errors import HmpError


@dataclass(frozen=True)
class BenchmarkRow:
    """One policy. What could not be measured is None.

    `seconds` is the median time of a step over the `samples`, one sample a round; `spread` is their interquartile range in
    seconds. `ratio` is the median, over the rounds, of a sample divided by the baseline's sample of the same round. `memory` is in
    bytes; `first_loss` and `last_loss` are those of the first and the last step of the first sample; `loss_change` is how far the
    last loss moved between the rounds, which all did the same. `error` is what the step raised, if it did.
    """

    name: str
    description: str
    seconds: float | None = None
    spread: float | None = None
    ratio: float | None = None
    memory: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    loss_change: float | None = None
    error: str | None = None
    samples: tuple[float, ...] = ()


class StepError(HmpError):
    """The step failed under every policy; `__cause__` is what it raised under the first."""


@dataclass(frozen=True, repr=False)
class Benchmark:
    """The rows in the order of the policies, and how they came about: `print(...)` shows a table.

    `baseline` names the row that ratios are taken against: "float32", or the first that ran. A sample was `untimed_steps` and
    then `steps` timed ones. `losses_compare` is whether every sample started from the same state. `memory_kind` says which memory.

    Example:
        >>> net, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
        >>> result = hmp.benchmark(lambda: net(x).sum().backward(), ["float32", "habana"], model=net, rounds=3, steps=1)
        >>> result["habana"].seconds > 0, result.to_dict()["baseline"]
        (True, 'float32')
        >>> path = result.to_json("benchmark.json")
    """

    rows: tuple[BenchmarkRow, ...]
    baseline: str
    rounds: int
    untimed_steps: int
    steps: int
    seed: int
    losses_compare: bool
    memory_kind: str
    device: str
    torch: str
    threads: int
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> BenchmarkRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no policy {name!r} was benchmarked; there are {', '.join(row.name for row in self.rows)}")

    def __iter__(self) -> Iterator[BenchmarkRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return table(self)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values, seconds and bytes.

        Returns:
            The fields; a loss that is not finite is the string "nan", "inf" or "-inf".
        """
        values: dict[str, Any] = json_values(versioned(asdict(self)))
        return values

    def to_json(self, path: str | Path) -> Path:
        """Write `to_dict()` into a file.

        Args:
            path: The file.

        Returns:
            The path.
        """
        return json_written(path, self.to_dict)


def table(result: Benchmark) -> str:
    """Return a heading, a line for each policy, and the notes."""
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
