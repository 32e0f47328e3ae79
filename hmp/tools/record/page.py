"""What a report says: sums, tables by op, module and line, and the module tree."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core import lists
from ...core.rules import registry
from ..formatting import count, share, short_entry, size, some
from ..formatting import duration as in_seconds
from ..pages.page import (
    Cell,
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
    place,
    whole,
)
from .models import Model
from .report import SHOWN, Report
from .rows import BYPASSED, GROUPS, REMEDIES, UNLISTED, Row, Violation, in_order, kinds, report_parts, summed, total

OUTSIDE = "(outside every module)"
TREE_LINES = 1200
TABLE_ROWS = 1000  # what a browser sorts at once, and what keeps the page below 2 MB; the JSON has them all


def report_page(report: Report) -> Page:
    """Return what the report says."""
    sums = total(report.rows)
    about = report.about
    recorded = [f"{in_seconds(about['seconds'])} recorded"]
    if about["ranks"] > 1:
        recorded.append(f"{about['ranks']} recordings added up")
    sections = [
        _violations(report.violations()),
        _models(report.models),
        Section("ops", "Ops", "By op, most time in casts first", [rows_table(report, "op", "cast_seconds", unlisted=True)]),
        _tree(report.rows),
        *(part.section(report) for part in report_parts().values()),
        _calls(report),
    ]
    opening: list[Part] = [Items(report.notes, is_notes=True)] if report.notes else []
    if report.never_called:
        opening.append(Text(f"Entries of your lists that no call matched: {some(report.never_called, SHOWN)}"))
    if report.uncast_calls:
        opening.append(Text(f"{report.uncast_calls:,} {_UNCAST}"))
    return Page(
        title="hmp report",
        verdict=verdict(report, sums),
        made=made_of(about, *recorded),
        policies=[_policy(each) for each in report.policies] or [("no policy was active", "")],
        cards=_cards(report, sums),
        opening=opening,
        sections=[each for each in sections if each is not None],
        closing=_CLOSING,
    )


@functools.cache
def _sentences() -> dict[str, str]:
    """Return what reports call a rule, in words → its sentence."""
    found = {UNLISTED: "on no list: left to torch"}
    found[BYPASSED] = "on a list, but called through a reference taken before hmp patched torch: hmp.unreachable() says where"
    for rule in dict.fromkeys((*(kind.rule for kind in lists.kinds()), *registry.RULES)):
        if rule.in_reports:
            found[rule.in_reports if rule.is_list else f"{rule.label} ({rule.number})"] = rule.sentence
    return found


def why(row: Row) -> Cell:
    """Return the rule that a row followed, with the entry that asked for it; it unfolds to what the rule does."""
    text = f"{row.rule}: {short_entry(row.source)}" if row.source else row.rule_in_words
    missing = f"; in float32, as {row.no_kernel:,} of {row.calls:,} calls had no kernel (R11)" if row.no_kernel else ""
    return Cell(text + missing, "rule", title=_sentences().get(row.rule_in_words, ""))


_CLOSING = (
    "Dtypes: of the floating-point inputs that the caller passed, of the computation, and of the result; ops without such inputs are left "
    "out. Times are the calling thread's; on an accelerator they include the kernels only with `hmp.record(synchronize=True)`. Autograd's "
    "own ops in backward are not included, because lists don't apply to them. Bytes cast: the tensors' sizes before their casts. Avoided: "
    "casts that were not needed because a copy was there. Kept: what autograd keeps for backward in a call of the model: "
    "activations, and copies of weights in another dtype."
)
_UNCAST = (
    "calls ran where no policy is active (optimizer steps, disable_casts(), outside of hmp.casts() or of an applied model), and are not "
    "counted here."
)


def _policy(policy: Mapping[str, Any]) -> tuple[str, str]:
    said = [f"{len(policy[name])} names on its {name.upper()} list" for name in lists.names() if policy.get(name)]
    return f"policy {policy['name']}", "; ".join([policy["dtype"], *said, f"fingerprint {policy['fingerprint']}"])


def _cards(report: Report, sums: Row) -> list[tuple[str, str, str]]:
    decided = sum(row.calls for row in report.rows if row.rule not in (BYPASSED, UNLISTED))
    return [
        ("in casts", in_seconds(sums.cast_seconds), f"{share(sums.cast_seconds, sums.seconds)} of the time in ops and casts"),
        ("in ops", in_seconds(sums.op_seconds), f"{count(sums.calls, 'call')}, {decided:,} decided by hmp"),
        ("casts", f"{sums.casts:,}", f"{size(sums.cast_bytes)}; {sums.casts_saved:,} more avoided, as a copy was there"),
        ("in float32, no kernel", f"{sums.no_kernel:,}", "calls (R11)"),
    ]


def _violations(found: list[Violation]) -> Section | None:
    if not found:
        return None
    rows = [
        [op(each.op), code(short_entry(each.source)), chips(each.wanted), chips(each.got), module(each.module), place(each),
         Cell(each.by), whole(each.calls)]
        for each in found
    ]  # fmt: skip
    columns = ("op", "entry", "wanted", "got", "module", "place", "overridden by", ">calls")
    table = Table(columns, rows, label="Calls that did not follow their list", where="report.violations() holds them")
    remedies = Items([f"{kind}: {REMEDIES[kind]}" for kind in kinds(found)])
    return Section("violations", "Did not follow", "Calls that did not follow their list", [table, remedies])


def rows_table(report: Report, by: str, sort: str, *, unlisted: bool = False) -> Table:
    """Return the rows that a rule decided, added up by "op", "module", "line" or "call"; those of no rule if `unlisted`."""
    found = in_order(report.grouped(by, "op_seconds", unlisted=unlisted), sort)
    fields = GROUPS[by]  # an op's dtypes are below it
    columns: list[str] = [name for name in ("op", "module", "line") if name in fields]
    lines = in_order(summed(found, fields), sort)
    below: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        below.setdefault(tuple(getattr(row, name) for name in fields), []).append(row)
    longest = max((row.seconds for row in lines), default=0.0)
    more = list(total(found).more)
    rows, groups = [], []
    for row in lines[:TABLE_ROWS]:
        parts = below[tuple(getattr(row, name) for name in fields)]
        names = {"op": _op(row.op, parts), "module": module(row.module), "line": place(row)}
        numbers = [whole(row.calls), whole(row.casts), whole(row.casts_saved), nbytes(row.cast_bytes), duration(row.cast_seconds)]
        numbers += [number(row.more.get(name, 0), f"{row.more.get(name, 0):,.6g}") for name in more]
        times = bar(longest, *((colour_class(part.compute), part.op_seconds) for part in parts), ("casts", row.cast_seconds))
        rows.append([*(names[name] for name in columns), *numbers, duration(row.op_seconds), times])
        groups.append(" ".join(dict.fromkeys(part.rule for part in parts)))
    columns += [">calls", ">casts", ">avoided", ">bytes cast", ">in casts", *(f">{name}" for name in more), ">in ops", ""]
    note = left_out(rows, len(lines), "rows", "`Report.to_json()`")
    return Table(columns, rows, f"What was cast, by {by}", note, most=TABLE_ROWS, groups=groups)


def _op(name: str, rows: Sequence[Row]) -> Cell:
    """Return an op with its dtypes and rules below it, each with its calls where they are several."""
    several = len(rows) > 1
    return op(name, *((flow(*row.stages), *([Cell(count(row.calls, "call"))] if several else []), why(row)) for row in rows))


def _tree(rows: Sequence[Row]) -> Section | None:
    root = tree(rows)
    heading = "The flow of casts through the modules"
    return Section("tree", "Casts by module", heading, [Tree(root, why)], is_long=True) if root.branches else None


def _models(models: list[Model]) -> Section | None:
    rows = [
        [op(f"{each.name} ({each.count:,} of them)" if each.count > 1 else each.name), whole(each.size), whole(each.trainable),
         Cell(each.dtypes), nbytes(each.parameter_bytes),
         nbytes(each.kept_bytes - each.kept_weight_bytes), nbytes(each.kept_weight_bytes)]
        for each in models
    ]  # fmt: skip
    columns = ("model", ">parameters", ">trainable", "dtypes", ">bytes", ">activations kept", ">weight copies kept")
    return Section("models", "Models", "Models", [Table(columns, rows, where="report.models holds them")]) if models else None


def _calls(report: Report) -> Section:
    table = rows_table(report, "call", "op_seconds", unlisted=True)
    choices = sorted({row.rule for row in report.rows})
    table = replace(table, label="Every distinct call", filter="op, module, file, dtype", choice="Rule", choices=choices)
    return Section("calls", "All calls", "All calls", [table], is_long=True)


@dataclass
class Branch:
    """A module in the tree: its own calls, and the modules below it; `counted` are the calls of both."""

    name: str
    rows: list[Row] = field(default_factory=list)
    branches: dict[str, Branch] = field(default_factory=dict)
    counted: list[Row] = field(default_factory=list)
    hidden: int = 0  # lines that the page leaves out

    @property
    def sums(self) -> Row:
        """Return what was counted of all its calls."""
        return total(self.counted)

    @property
    def dtypes(self) -> list[str]:
        """Return the dtypes that its calls compute in, most calls first."""
        calls: Counter[str] = Counter()
        for row in self.counted:
            calls[row.compute] += row.calls
        return [dtype for dtype, _ in calls.most_common() if dtype]


def tree(rows: Sequence[Row]) -> Branch:
    """Return the modules of `rows` as a tree in the order of their first calls, with the calls that take most time."""
    root = Branch("all modules")
    shown = {id(row) for row in sorted(rows, key=lambda row: -row.seconds)[:TREE_LINES]}
    for row in sorted(rows, key=lambda row: id(row) not in shown):
        branch = root
        branch.counted.append(row)
        for name in row.module.split(".") if row.module else [OUTSIDE]:
            if name not in branch.branches:
                if id(row) not in shown:
                    break
                branch.branches[name] = Branch(name)
            branch = branch.branches[name]
            branch.counted.append(row)
        if id(row) in shown:
            branch.rows.append(row)
        else:
            branch.hidden += 1
    return root


def verdict(report: Report, sums: Row) -> str:
    """Return what was seen, in a sentence."""
    if all(row.rule in (BYPASSED, UNLISTED) for row in report.rows):
        if report.policies:
            return f"A policy was active, but no op on its lists is among the {count(sums.calls, 'call')}."
        told = "use hmp.apply(), hmp.casts() or hmp.convert(), before or inside hmp.record()"
        return f"No policy applied to any of {count(sums.calls, 'call')}: {told}."
    dtypes = sorted({policy["dtype"] for policy in report.policies})
    low = sum(row.calls for row in report.rows if row.compute in dtypes)
    casts = f"; casts took {share(sums.cast_seconds, sums.seconds)} of the time in ops and casts" if sums.seconds else ""
    return f"{low:,} of {sums.calls:,} call{'s' if sums.calls != 1 else ''} computed in {' or '.join(dtypes)}{casts}."
