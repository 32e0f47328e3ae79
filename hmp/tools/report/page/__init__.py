"""The page: a report or a comparison as one HTML file that needs no network."""

from __future__ import annotations

import re
from typing import Any

from ...extras import needed

with needed("a report's page needs", "report", "jinja2"):
    import jinja2
    import markupsafe

from ....core.formatting import share, size, two_digits, typeset_duration
from ....core.rules import rules
from ..kept_packed import merged as merged_kept
from ..models import shares
from ..report import Report
from ..rows import BYPASSED, UNLISTED, Row, entry, total
from ..violations import OverrideKind, Violation, kinds
from . import charts, model

UNLISTED_OPS, FP8_ROWS, MODELS, KEPT_ROWS = 15, 200, 12, 12
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}
# What reports call a rule → the sentences of all rules that they call so.
RULES: dict[str, list[str]] = {}
for _rule in rules.RULES:
    if _rule.in_reports:
        RULES.setdefault(_rule.in_reports, []).append(_rule.sentence)
RULES[UNLISTED] = ["on no list: left to torch"]
RULES[BYPASSED] = ["on a list, and called by a name that Python code took before: hmp.unreachable() says where"]


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
        verdict=model.verdict(report, sums),
        sums=sums,
        decided=sum(row.calls for row in rows if row.rule not in (BYPASSED, UNLISTED)),
        headline=model.headline(report),
        parts=model.parts(rows),
        violations=violations,
        remedies={kind: OverrideKind(kind).remedy for kind in kinds(violations)},
        computed=sorted({row.compute for row in rows} - {""}),
        chart=charts.time_and_calls(model.op_bars(rows)) if rows else "",
        places=[(row, model.modules_of(report, row)) for row in model.cast_places(report)],
        models=models[:MODELS],
        models_all=len(models),
        kept=[(each, kept[:KEPT_ROWS], len(kept)) for each in models[:MODELS] if (kept := shares(each.kept or {}))],
        tree=model.tree(rows),
        unlisted=unlisted[:UNLISTED_OPS],
        unlisted_more=max(len(unlisted) - UNLISTED_OPS, 0),
        in_fp8=sorted(report.fp8, key=lambda row: (-row.flushed, -row.saturated))[:FP8_ROWS],
        in_fp8_all=len(report.fp8),
        kept_packed=merged_kept(report.kept),
        no_kernel=report.no_kernel,
        never=model.never_called(report),
        table=shown[: model.TABLE_ROWS],
        table_all=len(shown),
        rules=RULES,
    )


def render(template: str, **values: Any) -> str:
    """The template with `values`; what they hold is text, and is escaped."""
    return _environment().get_template(template).render(**values)


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    made.filters |= {
        "duration": lambda seconds: _kept(typeset_duration(seconds)),
        "size": lambda number: _kept(size(number)),
        "entry": entry,
        "share": lambda part, whole: _kept(share(part, whole)),
        "dotted": _breakable,
        "count": lambda number: f"{number:,}",
        "amount": _amount,
        "dtypes": lambda text: text.split(", ") if text else [],
        "place": _place,
        "short": lambda dtype: _SHORT.get(dtype, dtype),
        "error": _error,
        "sortable": lambda value: -1 if value is None else min(value, 1e300),  # JavaScript reads no "inf"
    }
    return made


def _kept(text: str) -> str:
    """A number and its unit on one line."""
    return text.replace(" ", "\u00a0")


def _amount(number: int) -> str:
    """A large number in short: "109.5 M"."""
    for unit, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= 10 * unit or number >= unit > 1e3:
            return _kept(f"{number / unit:,.1f} {word}")
    return f"{number:,}"


def _breakable(text: str) -> markupsafe.Markup:
    """A long name that may go on in the next line after a dot or an underscore, and between the words of a class's name."""
    return markupsafe.Markup(re.sub(r"(?<=[._])|(?<=[a-z])(?=[A-Z])", "<wbr>", str(markupsafe.escape(text))))


def _place(row: Row | Violation) -> str:
    """The file's name and the line; the page says the whole path when it is pointed at."""
    return f"{row.file.replace(chr(92), '/').rpartition('/')[2]}:{row.line}" if row.file else "-"


def _error(value: float | None) -> str:
    return two_digits(value).replace("e-0", "e-").replace("e+0", "e")
