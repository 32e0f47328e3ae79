"""A report as text: tables of rich's."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ..extras import needed

with needed("a report's tables need", "report", "rich"):
    from rich.console import Console, Group
    from rich.table import Table

from ..formatting import duration, size
from .in_fp8 import Fp8Row, merged
from .kept_packed import KeptRow
from .kept_packed import merged as merged_kept
from .models import Model, Share, shares
from .report import Report
from .rows import PAST, UNLISTED, Row, entry, in_words, total
from .violations import REMEDIES, Violation, kinds

_WIDTH = 200
_UNCAST = "Where no casts are in force (disable_casts(), optimizer steps, outside of a region or of an applied model)"
_SHOWN = 25  # unlisted ops, and names that were never called; the JSON has them all


def text(report: Report) -> str:
    """The report as plain text: listed ops by cast time, unlisted ops by time, and what else there is to know."""
    page = io.StringIO()
    console = Console(file=page, width=_WIDTH, color_system=None, highlight=False)
    decided = table(report, "op", "cast_seconds")
    parts: list[object] = [_heading(report)]
    violations = report.violations()
    if violations:
        parts += [_violations(violations), "", *(f"{kind}: {REMEDIES[kind]}." for kind in kinds(violations)), ""]
    if report.models:
        parts += [_models(report.models), ""]
    parts.append(decided)
    unlisted = report.unlisted
    if unlisted:
        parts += ["", _unlisted(unlisted)]
    if report.fp8:
        parts += ["", _in_fp8(report.fp8)]
    elif any(policy.get("fp8") for policy in report.policies):
        parts += ["", "Nothing ran in FP8: the ops on its list were not called, or could not (hmp.fallbacks() says why)."]
    if report.kept:
        parts += ["", _kept_packed(report.kept)]
    if report.no_kernel:
        parts += ["", "In float32 for want of a kernel (R11): " + ", ".join(f"{r.op} ({r.no_kernel})" for r in report.no_kernel)]
    if report.never_called:
        names = report.never_called
        told = ", ".join(names) if len(names) <= _SHOWN else f"{len(names)} names, which report.never_called holds"
        parts += ["", f"Listed and never called: {told}."]
    if report.uncast_calls:
        parts += ["", f"{_UNCAST}: {report.uncast_calls} calls."]
    parts += [line for note in report.notes for line in ("", note)]
    console.print(Group(*parts))  # type: ignore[arg-type]
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def table(report: Report, by: str = "op", sort: str = "cast_seconds") -> Table:
    """The rows that a rule decided, added up by "op", "module", "line" or "call"."""
    named = {"op": ("op", "rule", "list entry", "dtypes"), "module": ("module",)}.get(by, ("op", "rule", "list entry", "dtypes", "place"))
    kept = _kept(report) if by == "module" else {}
    made = _headed(named, ("calls", "casts", "saved", "cast", "in casts", "in ops", *(["kept by a call"] if kept else [])))
    for row in report.grouped(by, sort, unlisted=False):
        values = {
            "op": row.op,
            "rule": in_words(row.rule),
            "list entry": entry(row.source),
            "dtypes": row.dtypes,
            "module": row.module,
            "place": row.place,
        }
        made.add_row(*(values[name] or "-" for name in named), *_counts(row), *([size(kept.get(row.module, 0))] if kept else []))
    return made


def _kept(report: Report) -> Counter[str]:
    """The bytes that a call of each model keeps for backward, by module: paths do not say of which model they are."""
    return sum((Counter(model.kept or {}) for model in report.models), Counter())


def _headed(words: Iterable[str], numbers: Iterable[str]) -> Table:
    """A table without rows: columns of words, which may be folded, and then of numbers."""
    made = Table(box=None, pad_edge=False)
    for name in words:
        made.add_column(name, overflow="fold")
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _violations(found: list[Violation]) -> Table:
    made = _headed(("ran otherwise than its line says", "line", "wanted", "got", "in", "who had the last word"), ("calls",))
    for each in found[:_SHOWN]:
        made.add_row(each.op, entry(each.source) or "-", each.wanted, each.got, each.place, f"{each.kind}: {each.by}", str(each.calls))
    if len(found) > _SHOWN:
        made.add_row(f"{len(found) - _SHOWN} more, with fewer calls: report.violations() holds them")
    return made


def _models(models: list[Model]) -> Table:
    made = _headed(("model", "dtypes"), ("parameters", "to be trained", "bytes", "kept for backward by a call"))
    made.add_column("most of that in", overflow="fold")
    for model in models[:_SHOWN]:
        name = f"{model.name} ({model.count} of them)" if model.count > 1 else model.name
        most = [f"{share.path} ({size(share.bytes)}{_modules(share)})" for share in shares(model.kept or {})[:3]]
        numbers = (f"{model.size:,}", f"{model.trainable:,}", size(model.parameter_bytes), size(model.kept_bytes))
        made.add_row(name, model.dtypes, *numbers, ", ".join(most) or "-")
    if len(models) > _SHOWN:
        made.add_row(f"{len(models) - _SHOWN} more: report.models holds them")
    return made


def _modules(share: Share) -> str:
    return f" in {share.modules} modules" if share.modules > 1 else ""


def _in_fp8(rows: list[Fp8Row]) -> Table:
    """By op and role; report.fp8 has the modules."""
    made = _headed(("in FP8", "role"), ("tensors", "amax", "scale", "saturated", "flushed to 0"))
    made.add_column("most flushed in", overflow="fold")
    for row in merged(replace(row, module="") for row in rows):
        worst = max((each for each in rows if (each.op, each.role) == (row.op, row.role)), key=lambda each: each.flushed)
        scales = " to ".join(dict.fromkeys((f"{row.least_scale:.2g}", f"{row.greatest_scale:.2g}")))
        shares = (f"{share:.2%}" for share in (row.saturated, row.flushed))
        where = f"{worst.module or '-'} ({worst.flushed:.2%})"
        made.add_row(row.op, row.role, str(row.tensors), f"{row.amax:.3g}", scales, *shares, where)
    return made


def _kept_packed(rows: list[KeptRow]) -> Table:
    """By op; report.kept has the modules."""
    made = _headed(("kept for backward by",), ("tensors", "bytes", "packed", "error", "in packing"))
    by_op = merged_kept(replace(row, module="") for row in rows)
    for row in (*sorted(by_op, key=lambda row: -row.nbytes), *merged_kept(replace(row, op="all", module="") for row in rows)):
        made.add_row(row.op, str(row.tensors), size(row.nbytes), size(row.left), f"{row.error:.2%}", duration(row.seconds))
    return made


def _unlisted(rows: list[Row]) -> Table:
    made = _headed(("on no list", "dtypes"), ("calls", "in ops"))
    for row in rows[:_SHOWN]:
        made.add_row(row.op, row.dtypes, str(row.calls), duration(row.op_seconds))
    if len(rows) > _SHOWN:
        made.add_row(f"{len(rows) - _SHOWN} more, with less time: report.unlisted holds them", "", "", "")
    return made


def _heading(report: Report) -> str:
    decided = sum(row.calls for row in report.rows if row.rule not in (PAST, UNLISTED))
    names = ", ".join(f"{each['name']} ({each['fingerprint']})" for each in report.policies) or "none"
    sums = total(report.rows)
    return (
        f"hmp record: policy {names}; {decided} decided calls, {sums.casts} casts ({size(sums.cast_bytes)}, "
        f"{duration(sums.cast_seconds)}), {sums.casts_saved} saved by the caches\n"
    )


def _counts(row: Row) -> list[str]:
    return [
        str(row.calls),
        str(row.casts),
        str(row.casts_saved),
        size(row.cast_bytes),
        duration(row.cast_seconds),
        duration(row.op_seconds),
    ]
