"""What a benchmark found: one BenchmarkRow for each policy, as values, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ...errors import HmpError
from ..formatting import NOTHING, count, duration, size
from ..pages.page import Cell, Items, Page, Result, Section, Table, number, op


@dataclass(frozen=True)
class BenchmarkRow:
    """One policy. What could not be measured is None.

    `seconds` is the median time of a step over the `samples`, one sample a round; `spread` is their interquartile range in
    seconds. `ratio` is the median, over the rounds, of a sample divided by the baseline's sample of the same round. `memory` is in
    bytes; `first_loss` and `last_loss` are those of the first and the last step of the first sample.
    `error` is what the step raised, if it did. `more` has the columns of plug-ins' lists, added up over one step, by name.
    """

    name: str
    seconds: float | None = None
    spread: float | None = None
    ratio: float | None = None
    memory: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    error: str | None = None
    samples: tuple[float, ...] = ()
    more: Mapping[str, float] = field(default_factory=dict)


class StepError(HmpError):
    """The step failed under every policy; `__cause__` is what it raised under the first."""


@dataclass(frozen=True, repr=False)
class Benchmark(Result):
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
        raise KeyError(f"expected a policy that was benchmarked, got {name!r}; these were: {', '.join(row.name for row in self.rows)}")

    def __iter__(self) -> Iterator[BenchmarkRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _page(self) -> Page:
        names = ["policy", ">step time", ">spread", f">vs {self.baseline}", f">{self.memory_kind}"]
        if self.losses_compare:
            names += [">loss, step 1", f">step {self.untimed_steps + self.steps}"]
        more = list(dict.fromkeys(name for row in self.rows for name in row.more))
        names += [f">{name}" for name in more]
        rows = [
            [
                op(row.name),
                *_numbers(row, self.losses_compare),
                *(number(row.more.get(name, 0), f"{row.more.get(name, 0):,.6g}") for name in more),
            ]
            for row in self.rows
            if row.error is None
        ]
        failed = [f"{row.name}: {row.error}" for row in self.rows if row.error is not None]
        threads = f", {count(self.threads, 'thread')}" if self.device == "cpu" else ""
        return Page(
            title="hmp benchmark",
            verdict=f"{self.device}, torch {self.torch}{threads}; medians of {count(self.rounds, 'round')}, "
            f"{count(self.steps, 'timed step')} a policy in each",
            sections=[
                Section("policies", "Policies", "", [Table(names, rows, label="Policies")]),
                *([Section("failed", "Failed", "", [Items(failed)])] if failed else []),
                *([Section("notes", "Notes", "", [Items(self.notes)])] if self.notes else []),
            ],
        )


def _numbers(row: BenchmarkRow, losses: bool) -> list[Cell]:
    def shown(value: float | None, text: Callable[[float], str]) -> Cell:
        return number(value, NOTHING if value is None else text(value))

    spread = None if row.seconds is None or row.spread is None else 100 * row.spread / (row.seconds or 1)
    cells = [
        shown(row.seconds, lambda seconds: duration(seconds, none="0 us")),
        shown(spread, "{:.1f} %".format),
        shown(row.ratio, "{:.2f}".format),
        shown(row.memory, lambda nbytes: size(nbytes, none="0 B")),
    ]
    return [*cells, *(shown(each, "{:.5g}".format) for each in (row.first_loss, row.last_loss))] if losses else cells
