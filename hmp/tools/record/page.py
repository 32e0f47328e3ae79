"""What a report says: sums, tables by op, module and line, and the module tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core import lists
from ...core.rules import registry
from ..formatting import count, share, short_entry, size, some, typeset_duration
from ..pages.page import (
    Cell,
    Heading,
    Items,
    Page,
    Part,
    Section,
    Table,
    Text,
    Tree,
    bar,
    chips,
    code,
    colour_class,
    duration,
    flow,
    left_out,
    made_of,
    module,
    nbytes,
    number,
    op,
    part,
    place,
    whole,
)
from .models import Model
from .parts import report_parts
from .report import Report
from .rows import BYPASSED, UNLISTED, OverrideKind, Row, Violation, grouped, in_words, kinds, total

OUTSIDE = "(outside every module)"
TREE_LINES = 1200
_OPEN_LEVELS = 3  # of the tree, which are shown before anything is unfolded
_NAMES = 100  # that are listed and never called; report.never_called has them all
TABLE_ROWS = 1000  # what a browser sorts at once, and what keeps the page below 2 MB; the JSON has them all


def report_page(report: Report) -> Page:
    """Return what the report says."""
    sums = total(report.rows)
    about = report.about
    recorded = [f"{typeset_duration(about['seconds'])} recorded"]
    if about["ranks"] > 1:
        recorded.append(f"{about['ranks']} recordings added up")
    sections = [
        _violations(report.violations()),
        _models(report.models),
        Section("ops", "Ops", "By op, most time in casts first", [rows_table(report, "op", "cast_seconds")]),
        _tree(report.rows),
        _unlisted(report, sums),
        *(part.section(report) for part in report_parts().values()),
        _calls(report),
        _lists(report),
    ]
    return Page(
        title="hmp report",
        verdict=verdict(report, sums),
        made=made_of(about, *recorded),
        policies=[_policy(each) for each in report.policies] or [("no policy was active", "")],
        cards=_cards(report, sums),
        opening=[Items(_notes(report), is_notes=True)] if _notes(report) else [],
        sections=[each for each in sections if each is not None],
        closing=rule_sentences(),
        closing_text=_CLOSING,
    )


def rule_sentences() -> dict[str, list[str]]:
    """Return what reports call a rule → the sentences of all rules that they call so."""
    found: dict[str, list[str]] = {}
    for rule in dict.fromkeys((*(kind.rule for kind in lists.kinds()), *registry.RULES)):
        if rule.in_reports:
            found.setdefault(rule.in_reports, []).append(rule.sentence)
    found[UNLISTED] = ["on no list: left to torch"]
    found[BYPASSED] = ["on a list, but called through a reference taken before hmp patched torch: hmp.unreachable() says where"]
    return found


_CLOSING = (
    "Dtypes: of the floating-point inputs that the caller passed, of the computation, and of the result. Times are the calling thread's; "
    "on an accelerator they include the kernels only with `hmp.record(synchronize=True)`. Autograd's own ops in backward are not included, "
    "because lists don't apply to them. Bytes cast: the tensors' sizes before their casts. Saved: casts that the caches made unnecessary."
)
_UNCAST = (
    "calls ran where no policy is active (optimizer steps, disable_casts(), outside of hmp.casts() or of an applied model), and are not "
    "counted here."
)


def _policy(policy: Mapping[str, Any]) -> tuple[str, str]:
    said = [f"{len(policy[name])} names on its {name.upper()} list" for name in lists.names() if policy.get(name)]
    return f"policy {policy['name']} {policy['fingerprint']}", f"{'; '.join([policy['dtype'], *said])}"


def _cards(report: Report, sums: Row) -> list[tuple[str, str, str]]:
    decided = sum(row.calls for row in report.rows if row.rule not in (BYPASSED, UNLISTED))
    return [
        ("in casts", typeset_duration(sums.cast_seconds), f"{share(sums.cast_seconds, sums.seconds)} of the time in ops and casts"),
        ("in ops", typeset_duration(sums.op_seconds), f"{sums.calls:,} calls, {decided:,} decided by hmp"),
        ("casts", f"{sums.casts:,}", f"{size(sums.cast_bytes)}; {sums.casts_saved:,} more saved by the caches"),
        ("in float32, no kernel", f"{sum(row.no_kernel for row in report.no_kernel):,}", "calls (R11)"),
        ("listed, never called", f"{len(report.never_called):,}", "entries, listed below"),
    ]


def _notes(report: Report) -> list[str]:
    return [*report.notes, *([f"{report.uncast_calls:,} {_UNCAST}"] if report.uncast_calls else [])]


def _violations(found: list[Violation]) -> Section | None:
    if not found:
        return None
    rows = [
        [op(each.op), code(short_entry(each.source), each.source), chips(each.wanted), chips(each.got), module(each.module), place(each),
         Cell(each.by), whole(each.calls)]
        for each in found
    ]  # fmt: skip
    columns = ("op", "entry", "wanted", "got", "module", "place", "overridden by", ">calls")
    table = Table(columns, rows, label="Calls that did not follow their list", where="report.violations() holds them")
    remedies = Items([f"{kind}: {OverrideKind(kind).remedy}" for kind in kinds(found)])
    return Section("violations", "Did not follow", "Calls that did not follow their list", [table, remedies])


def rows_table(report: Report, by: str, sort: str, *, unlisted: bool = False) -> Table:
    """Return the rows that a rule decided, added up by "op", "module", "line" or "call"; those of no rule if `unlisted`."""
    words = {"op": ("op", "rule", "list entry", "dtypes"), "module": ("module",)}.get(
        by, ("op", "rule", "list entry", "dtypes", "module", "line")
    )
    kept = sum((Counter(model.kept or {}) for model in report.models), Counter[str]()) if by == "module" else {}
    found = report.grouped(by, sort, unlisted=unlisted)
    longest = max((row.seconds for row in found), default=0.0)
    more = list(total(found).more)
    lines = []
    for row in found[:TABLE_ROWS]:
        cells = {
            "op": op(row.op),
            "rule": Cell(in_words(row.rule)),
            "list entry": code(short_entry(row.source), row.source),
            "dtypes": flow(*row.stages),
            "module": module(row.module),
            "line": place(row),
        }
        numbers = [whole(row.calls), whole(row.casts), whole(row.casts_saved), nbytes(row.cast_bytes), duration(row.cast_seconds)]
        numbers += [number(row.more.get(name, 0), f"{row.more.get(name, 0):,.6g}") for name in more]
        times = [duration(row.op_seconds), bar(longest, (colour_class(row.compute), row.op_seconds), ("casts", row.cast_seconds))]
        lines.append([*(cells[word] for word in words), *numbers, *times, *([nbytes(kept.get(row.module, 0))] if kept else [])])
    columns = (
        *words,
        ">calls",
        ">casts",
        ">saved",
        ">cast",
        ">in casts",
        *(f">{name}" for name in more),
        ">in ops",
        "",
        *([">saved for backward"] if kept else []),
    )
    note = left_out(lines, len(found), "rows", "`Report.to_json()`")
    return Table(columns, lines, f"What was cast, by {by}", note, most=TABLE_ROWS, groups=[row.rule for row in found[:TABLE_ROWS]])


def _tree(rows: Sequence[Row]) -> Section | None:
    root = tree(rows)
    heading = "The flow of casts through the modules"
    return Section("tree", "Casts by module", heading, [Tree(root)], is_long=True) if root.branches else None


def _models(models: list[Model]) -> Section | None:
    rows = [
        [op(f"{each.name} ({each.count:,} of them)" if each.count > 1 else each.name), whole(each.size), whole(each.trainable),
         Cell(each.dtypes), nbytes(each.parameter_bytes), nbytes(each.kept_bytes)]
        for each in models
    ]  # fmt: skip
    columns = ("model", ">parameters", ">trainable", "dtypes", ">bytes", ">saved for backward by a call")
    return Section("models", "Models", "Models", [Table(columns, rows, where="report.models holds them")]) if models else None


def _unlisted(report: Report, sums: Row) -> Section | None:
    rows = [
        [op(row.op), flow(*row.stages), whole(row.calls), duration(row.op_seconds), part(row.op_seconds, sums.seconds)]
        for row in report.unlisted
    ]
    columns = ("op", "dtypes", ">calls", ">in ops", ">share")
    table = Table(columns, rows, label="Ops on no list", where="report.unlisted holds them")
    return (
        Section("unlisted", "On no list", "Ops on no list, computed in the dtype of their inputs; most time first", [table])
        if rows
        else None
    )


def _calls(report: Report) -> Section:
    table = rows_table(report, "call", "op_seconds", unlisted=True)
    table = replace(table, label="Every distinct call", filter="op, module, file, dtype", choice="Rule", choices=list(rule_sentences()))
    return Section("calls", "All calls", "All calls", [table], is_long=True)


def _lists(report: Report) -> Section | None:
    found: list[Part] = []
    if report.no_kernel:
        found.append(Heading("In float32, because the device has no kernel (R11)"))
        listed = [f", listed as {short_entry(row.source)}" if row.source else "" for row in report.no_kernel]
        calls = [f"{row.no_kernel:,} of {row.calls:,} calls" for row in report.no_kernel]
        found.append(Items([f"`{row.op}`: {told}{where}" for row, told, where in zip(report.no_kernel, calls, listed, strict=True)]))
    if report.never_called:
        told = "A list may have more ops than one model calls. If you expected one of these to run, check its name against the ops above."
        found += [Text(told, is_soft=True), Text(f"Listed and never called: {some(report.never_called, _NAMES)}")]
    return Section("lists", "Lists", "The lists and this program", found) if found else None


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


def tree(rows: Iterable[Row]) -> Branch:
    """Return the modules of `rows` as a tree in the order of their first calls."""
    root = Branch("all modules", "", open=True)
    for row in rows:
        branch = root
        for name in row.module.split(".") if row.module else [OUTSIDE]:
            path = f"{branch.path}.{name}" if branch.path else name
            branch = branch.branches.setdefault(name, Branch(name, path, open=path.count(".") + 2 < _OPEN_LEVELS))
        branch.rows.append(row)
    _add_up(root)
    slowest = sorted(_rows_in(root), key=lambda row: -row.seconds)[:TREE_LINES]
    _cut(root, {id(row) for row in slowest})
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


def _rows_in(branch: Branch) -> list[Row]:
    return [*branch.rows, *(row for each in branch.branches.values() for row in _rows_in(each))]


def _cut(branch: Branch, kept: set[int]) -> bool:
    """Leave out all rows but those with these ids, and modules without any; return True if there is something left."""
    rows = [row for row in branch.rows if id(row) in kept]
    branches = {name: each for name, each in branch.branches.items() if _cut(each, kept)}
    branch.hidden = len(branch.rows) - len(rows) + len(branch.branches) - len(branches)
    branch.rows, branch.branches = rows, branches
    return bool(rows or branches)


def verdict(report: Report, sums: Row) -> str:
    """Return what was seen, in a sentence."""
    if all(row.rule in (BYPASSED, UNLISTED) for row in report.rows):
        return f"No policy applied to any of {count(sums.calls, 'call')}: all ran as in plain torch."
    dtypes = sorted({policy["dtype"] for policy in report.policies})
    low = sum(row.calls for row in report.rows if row.compute in dtypes)
    casts = f"; casts took {share(sums.cast_seconds, sums.seconds)} of the time in ops and casts" if sums.seconds else ""
    return f"{low:,} of {sums.calls:,} call{'s' if sums.calls != 1 else ''} computed in {' or '.join(dtypes)}{casts}."
