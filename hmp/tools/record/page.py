"""The page of a report: sums, charts, and the module tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ...core.formatting import count, share, some
from ...core.rules import rules
from ..pages import charts
from ..pages.html import render
from .models import pattern, shares
from .packing_stats import merged as merged_kept
from .report import Report
from .rows import BYPASSED, GROUPS, UNLISTED, Row, grouped, total
from .violations import OverrideKind, kinds

UNLISTED_OPS, FP8_ROWS, MODELS, KEPT_ROWS = 15, 200, 12, 12
# What reports call a rule → the sentences of all rules that they call so.
RULES: dict[str, list[str]] = {}
for _rule in rules.RULES:
    if _rule.in_reports:
        RULES.setdefault(_rule.in_reports, []).append(_rule.sentence)
RULES[UNLISTED] = ["on no list: left to torch"]
RULES[BYPASSED] = ["on a list, and called by a name that Python code took before: hmp.unreachable() says where"]
OUTSIDE = "(outside every module)"
TABLE_ROWS = 1000  # what a browser sorts at once, and what keeps the page below 2 MB; the JSON has them all
TREE_LINES = 1200
_BARS, _PLACES = 14, 8  # ops of the chart, and lines with most time in casts
_OPEN_LINES = 26  # lines of the tree that are unfolded at first: about a screen


def report_page(report: Report) -> str:
    """The page of `report`, as HTML."""
    rows = report.rows
    sums = total(rows)
    unlisted = report.unlisted
    violations = report.violations()
    shown = sorted(report.grouped("call"), key=lambda row: -row.seconds)
    models = report.models
    return render(
        "report.html.j2",
        title="hmp report",
        report=report,
        made=report.about,
        verdict=verdict(report, sums),
        sums=sums,
        decided=sum(row.calls for row in rows if row.rule not in (BYPASSED, UNLISTED)),
        headline=headline(report),
        parts=parts(rows),
        violations=violations,
        remedies={kind: OverrideKind(kind).remedy for kind in kinds(violations)},
        computed=sorted({row.compute for row in rows} - {""}),
        chart=charts.time_and_calls(op_bars(rows)) if rows else "",
        places=[(row, modules_of(report, row)) for row in cast_places(report)],
        models=models[:MODELS],
        models_all=len(models),
        kept=[(each, kept[:KEPT_ROWS], len(kept)) for each in models[:MODELS] if (kept := shares(each.kept or {}))],
        tree=tree(rows),
        unlisted=unlisted[:UNLISTED_OPS],
        unlisted_more=max(len(unlisted) - UNLISTED_OPS, 0),
        in_fp8=sorted(report.fp8, key=lambda row: (-row.flushed, -row.saturated))[:FP8_ROWS],
        in_fp8_all=len(report.fp8),
        kept_packed=merged_kept(report.kept),
        no_kernel=report.no_kernel,
        never=never_called(report),
        table=shown[:TABLE_ROWS],
        table_all=len(shown),
        rules=RULES,
    )


@dataclass
class Branch:
    """A module in the tree: its own calls, by op, and the modules below it; `sums` are of both."""

    name: str
    path: str
    rows: list[Row] = field(default_factory=list)
    branches: dict[str, Branch] = field(default_factory=dict)
    sums: Row = field(default_factory=lambda: total(()))
    dtypes: list[str] = field(default_factory=list)  # that its calls compute in, most calls first
    open: bool = False
    hidden: int = 0  # lines below it that the page leaves out

    def walk(self) -> Iterator[Branch]:
        """The branch and all below it."""
        yield self
        for branch in self.branches.values():
            yield from branch.walk()

    @property
    def lines(self) -> int:
        """The lines that unfolding it adds."""
        return len(self.branches) + len(self.rows)


def tree(rows: Iterable[Row]) -> Branch:
    """The modules of `rows` as a tree in the order of their first calls; the part with most cast time is unfolded."""
    root = Branch("all modules", "", open=True)
    for row in rows:
        branch = root
        for name in row.module.split(".") if row.module else [OUTSIDE]:
            path = f"{branch.path}.{name}" if branch.path else name
            branch = branch.branches.setdefault(name, Branch(name, path))
        branch.rows.append(row)
    _add_up(root)
    _unfold(root)
    _cut(root)
    return root


def _add_up(branch: Branch) -> list[Row]:
    own = branch.rows
    below = [row for each in branch.branches.values() for row in _add_up(each)]
    branch.rows = sorted(grouped(own, "line"), key=lambda row: -row.seconds)
    branch.sums = total([*own, *below])
    calls: Counter[str] = Counter()
    for row in (*own, *below):
        calls[row.compute] += row.calls
    branch.dtypes = [dtype for dtype, _ in calls.most_common() if dtype]
    return [*own, *below]


def _unfold(root: Branch) -> None:
    left = _OPEN_LINES - root.lines
    closed = list(root.branches.values())
    while closed:
        chosen = max(closed, key=lambda branch: (branch.sums.cast_seconds, branch.sums.op_seconds))
        closed.remove(chosen)
        if chosen.lines <= left:
            chosen.open = True
            left -= chosen.lines
            closed += chosen.branches.values()


def _cut(root: Branch) -> None:
    """Leaves out the lines of ops with the least time where there are too many, and then the innermost modules."""
    order = sorted((row for branch in root.walk() for row in branch.rows), key=lambda row: -row.seconds)
    modules = sum(1 for _ in root.walk())
    kept = {id(row) for row in order[: max(TREE_LINES - modules, TREE_LINES // 4)]}
    for branch in root.walk():
        shown = [row for row in branch.rows if id(row) in kept]
        branch.hidden += len(branch.rows) - len(shown)
        branch.rows = shown
    room = TREE_LINES
    level = [root]
    while level:
        below = sorted((each for branch in level for each in branch.branches.values()), key=lambda branch: -branch.sums.seconds)
        dropped = {id(each) for each in below[room:]}
        for branch in level:
            for name, each in list(branch.branches.items()):
                if id(each) in dropped:
                    branch.hidden += sum(1 + inner.hidden + len(inner.rows) for inner in branch.branches.pop(name).walk())
        level = below[:room]
        room -= len(level)


def op_bars(rows: Iterable[Row]) -> list[charts.OpBar]:
    """The ops with most time, most first; those that are left are one bar, "n others"."""
    bars = sorted(_bars(rows, lambda row: row.op), key=lambda bar: (-bar.total, -sum(bar.calls.values())))
    if len(bars) <= _BARS + 1:
        return bars
    names = {bar.op for bar in bars[_BARS:]}
    (others,) = _bars([row for row in rows if row.op in names], lambda row: f"{len(names)} others")
    return [*bars[:_BARS], others]


def _bars(rows: Iterable[Row], named: Callable[[Row], str]) -> list[charts.OpBar]:
    found: dict[str, charts.OpBar] = {}
    for row in rows:
        bar = found.setdefault(named(row), charts.OpBar(named(row), {}, {}, 0.0))
        dtype = row.compute or "other"
        bar.seconds[dtype] = bar.seconds.get(dtype, 0.0) + row.op_seconds
        bar.calls[dtype] = bar.calls.get(dtype, 0) + row.calls
        found[bar.op] = charts.OpBar(bar.op, bar.seconds, bar.calls, bar.cast_seconds + row.cast_seconds)
    return list(found.values())


@dataclass(frozen=True)
class Part:
    """A part of the whole time: "bfloat16", ..., or "casts"."""

    name: str
    seconds: float


def parts(rows: Iterable[Row]) -> list[Part]:
    """Where the time went: into ops by compute dtype, and into casts."""
    found: dict[str, float] = {}
    for row in rows:
        dtype = row.compute or "other"
        found[dtype] = found.get(dtype, 0.0) + row.op_seconds
    casts = sum(row.cast_seconds for row in rows)
    return [Part(name, found[name]) for name in sorted(found) if found[name]] + ([Part("casts", casts)] if casts else [])


def cast_places(report: Report) -> list[Row]:
    """The lines of the program that spent most time in casts."""
    return [row for row in report.grouped("line", "cast_seconds")[:_PLACES] if row.casts]


def modules_of(report: Report, row: Row) -> str:
    """The modules in which the calls of a row of `cast_places()` were made; "layer.*.dense (12 modules)" for repeated ones."""
    known = [getattr(row, name) for name in GROUPS["line"]]
    return in_short(each.module for each in report.rows if [getattr(each, name) for name in GROUPS["line"]] == known)


def in_short(modules: Iterable[str]) -> str:
    """The names of modules, those that differ in a number taken together."""
    found: dict[str, set[str]] = {}
    for module in modules:
        found.setdefault(pattern(module), set()).add(module)
    return some([(next(iter(kept)) or OUTSIDE) if len(kept) == 1 else f"{same} ({len(kept)} modules)" for same, kept in found.items()], 2)


def verdict(report: Report, sums: Row) -> str:
    """Return what was seen, in a sentence."""
    if all(row.rule in (BYPASSED, UNLISTED) for row in report.rows):
        return f"No policy decided any of {count(sums.calls, 'call')}: all ran as torch has them."
    dtypes = sorted({policy["dtype"] for policy in report.policies})
    low = sum(row.calls for row in report.rows if row.compute in dtypes)
    casts = f"; casts took {share(sums.cast_seconds, sums.seconds)} of the time in ops and casts" if sums.seconds else ""
    return f"{low:,} of {sums.calls:,} call{'s' if sums.calls != 1 else ''} computed in {' or '.join(dtypes)}{casts}."


def headline(report: Report) -> str:
    """Which op, and which line, spent most time in casts; "" where none was made."""
    ops = sorted(_bars(report.rows, lambda row: row.op), key=lambda bar: -bar.cast_seconds)
    whole = sum(bar.cast_seconds for bar in ops)
    if not whole:
        return ""
    named = [f"{bar.op} ({share(bar.cast_seconds, whole)})" for bar in ops[:3] if bar.cast_seconds >= 0.05 * whole]
    lines: dict[tuple[str, str, int], list[Row]] = {}
    for row in report.rows:
        lines.setdefault((row.op, row.file, row.line), []).append(row)  # calls in several dtypes and modules
    (op, path, line), rows = max(lines.items(), key=lambda found: sum(row.cast_seconds for row in found[1]))
    file = path.replace("\\", "/").rpartition("/")[2]
    return (
        f"Most cast time: {', '.join(named)}. The line with most of it: {file}:{line}, {op} in "
        f"{in_short(row.module for row in rows)}, {share(sum(row.cast_seconds for row in rows), whole)}."
    ).replace(" %", "\u00a0%")


def never_called(report: Report) -> dict[str, list[str]]:
    """The listed names that were never called, by list."""
    never = set(report.never_called)
    found = {}
    for cast in ("bf16", "fp32", "promote"):
        names = sorted({name for policy in report.policies for name in policy[cast]} & never)
        if names:
            found[cast] = names
    return found
