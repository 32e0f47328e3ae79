"""A report as a small piece of HTML, for notebooks."""

from __future__ import annotations

from ..formatting import duration, html, share, size
from .report import Report
from .rows import entry

_SHOWN = 12
_HEADS = ("op", "rule", "list entry", "inputs → compute → output", "calls", "casts", "bytes cast", "in casts", "in ops")


def fragment(report: Report) -> html.Html:
    """The sums of `report`, its ops with most time, and its notes."""
    rows = report.rows
    casts, ops = sum(row.cast_seconds for row in rows), sum(row.op_seconds for row in rows)
    policies = ", ".join(policy["name"] for policy in report.policies) or "none"
    shown = sorted(report.grouped("op"), key=lambda row: -(row.cast_seconds + row.op_seconds))
    table = html.table(
        _HEADS,
        [
            (
                html.code(row.op), row.rule, entry(row.source), html.flow(row.inputs, row.compute, row.output), f"{row.calls:,}",
                f"{row.casts:,}", size(row.cast_bytes), duration(row.cast_seconds), duration(row.op_seconds),
            )
            for row in shown[:_SHOWN]
        ],
        numbers=5,
    )  # fmt: skip
    parts: list[object] = [
        html.Html(
            f"hmp report: policy <b>{html.text(policies)}</b>, {sum(row.calls for row in rows):,} calls, "
            f"{sum(row.casts for row in rows):,} casts; {duration(casts)} in casts ({html.text(share(casts, casts + ops))}), "
            f"{duration(ops)} in ops"
        ),
        table,
    ]
    if len(shown) > _SHOWN:
        parts.append(f"… and {len(shown) - _SHOWN} more: report.table(), report.to_html(path)")
    return html.box(*parts, *report.notes)
