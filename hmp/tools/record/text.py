"""A report as text: tables with aligned columns, and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...core.formatting import NOTHING, aligned, duration, short_entry, size
from .fp8_stats import Fp8Row, merged
from .models import Model, Share, shares
from .packing_stats import PackingRow
from .packing_stats import merged as merged_kept
from .report import Report
from .rows import BYPASSED, UNLISTED, Row, in_words, total
from .violations import OverrideKind, Violation, kinds

_UNCAST = "Where no casts are in force (disable_casts(), optimizer steps, outside of a region or of an applied model)"
_SHOWN = 25  # rows of a table, and names that were never called; the JSON has them all


def text(report: Report) -> str:
    """Return the report as plain text: listed ops by cast time, unlisted ops by time, and what else there is to know."""
    parts = [_heading(report)]
    violations = report.violations()
    if violations:
        parts += [_violations(violations), "\n".join(f"{kind}: {OverrideKind(kind).remedy}." for kind in kinds(violations))]
    if report.models:
        parts.append(_models(report.models))
    parts.append(table(report))
    unlisted = report.unlisted
    if unlisted:
        parts.append(_unlisted(unlisted))
    if report.fp8:
        parts.append(_in_fp8(report.fp8))
    elif any(policy.get("fp8") for policy in report.policies):
        parts.append("Nothing ran in FP8: the ops on its list were not called, or could not (hmp.fallbacks() says why).")
    if report.kept:
        parts.append(_kept_packed(report.kept))
    if report.no_kernel:
        parts.append("In float32 for want of a kernel (R11): " + ", ".join(f"{r.op} ({r.no_kernel})" for r in report.no_kernel))
    if report.never_called:
        names = report.never_called
        told = ", ".join(names) if len(names) <= _SHOWN else f"{len(names)} names, which report.never_called holds"
        parts.append(f"Listed and never called: {told}.")
    if report.uncast_calls:
        parts.append(f"{_UNCAST}: {report.uncast_calls} calls.")
    return "\n\n".join([*parts, *report.notes])


def table(report: Report, by: str = "op", sort: str = "cast_seconds") -> str:
    """Return a table of the rows that a rule decided, added up by "op", "module", "line" or "call"."""
    words = {"op": ("op", "rule", "list entry", "dtypes"), "module": ("module",)}.get(by, ("op", "rule", "list entry", "dtypes", "place"))
    numbers = ("calls", "casts", "saved", "cast", "in casts", "in ops")
    kept = _kept(report) if by == "module" else {}
    cells = []
    for row in report.grouped(by, sort, unlisted=False):
        values = {
            "op": row.op,
            "rule": in_words(row.rule),
            "list entry": short_entry(row.source),
            "dtypes": row.dtypes,
            "module": row.module,
            "place": row.place,
        }
        cells.append([*(values[name] or NOTHING for name in words), *_counts(row), *([size(kept.get(row.module, 0))] if kept else [])])
    return _table(words, (*numbers, *(["kept by a call"] if kept else [])), cells)


def _table(words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], last: str | None = None) -> str:
    """Return a table: columns of words, then of numbers, then one of words where it has a name."""
    heading = [*words, *numbers, *([] if last is None else [last])]
    return "\n".join(aligned([heading, *rows], {*range(len(words)), len(words) + len(numbers)}))


def _more(rows: Sequence[object], where: str) -> str:
    """Return a line below a table that says how many of `rows` it leaves out, and where they are; "" if it shows them all."""
    return f"\n{len(rows) - _SHOWN} more{where}" if len(rows) > _SHOWN else ""


def _kept(report: Report) -> Counter[str]:
    """Return the bytes that a call of each model saves for backward, by module: paths do not say of which model they are."""
    return sum((Counter(model.kept or {}) for model in report.models), Counter())


def _violations(found: list[Violation]) -> str:
    words = ("did not follow its list", "entry", "wanted", "got", "in", "overridden by")
    rows = [
        (each.op, short_entry(each.source) or NOTHING, each.wanted, each.got, each.place, f"{each.kind}: {each.by}", str(each.calls))
        for each in found[:_SHOWN]
    ]
    return _table(words, ("calls",), rows) + _more(found, ", with fewer calls: report.violations() holds them")


def _models(models: list[Model]) -> str:
    rows = []
    for model in models[:_SHOWN]:
        name = f"{model.name} ({model.count} of them)" if model.count > 1 else model.name
        most = [f"{share.path} ({size(share.bytes)}{_modules(share)})" for share in shares(model.kept or {})[:3]]
        numbers = (f"{model.size:,}", f"{model.trainable:,}", size(model.parameter_bytes), size(model.kept_bytes))
        rows.append((name, model.dtypes, *numbers, ", ".join(most) or NOTHING))
    named = ("parameters", "to be trained", "bytes", "kept for backward by a call")
    return _table(("model", "dtypes"), named, rows, "most of that in") + _more(models, ": report.models holds them")


def _modules(share: Share) -> str:
    return f" in {share.modules} modules" if share.modules > 1 else ""


def _in_fp8(found: list[Fp8Row]) -> str:
    """By op and role; report.fp8 has the modules."""
    rows = []
    for row in merged(replace(row, module="") for row in found):
        worst = max((each for each in found if (each.op, each.role) == (row.op, row.role)), key=lambda each: each.flushed)
        scales = " to ".join(dict.fromkeys((f"{row.least_scale:.2g}", f"{row.greatest_scale:.2g}")))
        parts = (f"{share:.2%}" for share in (row.saturated, row.flushed))
        where = f"{worst.module or NOTHING} ({worst.flushed:.2%})"
        rows.append((row.op, row.role, str(row.tensors), f"{row.amax:.3g}", scales, *parts, where))
    return _table(("in FP8", "role"), ("tensors", "amax", "scale", "saturated", "flushed to 0"), rows, "most flushed in")


def _kept_packed(found: list[PackingRow]) -> str:
    """By op; report.kept has the modules."""
    by_op = merged_kept(replace(row, module="") for row in found)
    every = merged_kept(replace(row, op="all", module="") for row in found)
    rows = [
        (row.op, str(row.tensors), size(row.nbytes), size(row.left), f"{row.error:.2%}", duration(row.seconds))
        for row in (*sorted(by_op, key=lambda row: -row.nbytes), *every)
    ]
    return _table(("kept for backward by",), ("tensors", "bytes", "packed", "error", "in packing"), rows)


def _unlisted(found: list[Row]) -> str:
    rows = [(row.op, row.dtypes, str(row.calls), duration(row.op_seconds)) for row in found[:_SHOWN]]
    return _table(("on no list", "dtypes"), ("calls", "in ops"), rows) + _more(found, ", with less time: report.unlisted holds them")


def _heading(report: Report) -> str:
    decided = sum(row.calls for row in report.rows if row.rule not in (BYPASSED, UNLISTED))
    names = ", ".join(f"{each['name']} ({each['dtype']}, {each['fingerprint']})" for each in report.policies) or "none"
    sums = total(report.rows)
    return (
        f"hmp record: policy {names}; {decided} decided calls, {sums.casts} casts ({size(sums.cast_bytes)}, "
        f"{duration(sums.cast_seconds)}), {sums.casts_saved} saved by the caches"
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
