"""The page of a comparison with float32: error by depth, the ops with most error, and a table.

`comparison_page(values)` takes plain values; what is not known may be left out, is None, or "" for text:

    title      what was compared: "habana against float32"
    policy     `Policy.to_dict()` of what was compared, or None
    notes      sentences that a reader must know
    dtype      the low dtype, "bfloat16" or "float16": its ulp is drawn into the chart
    rows       one for each op in each place, in the order of the calls:
        op            the op's id as lists spell it
        direction     "forward" or "backward"
        module        path of the module
        dtype         the dtype that it computed in
        calls         how often it was called
        isolated      relative error of its result on exact inputs: what the op itself adds
        accumulated   relative error of its result in the whole run: what arrives there
        ulps          the isolated error in units of the low dtype's last place
        rule, file, line    as in a report's rows
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import charts, render

# half a unit in the last place of 1.0: the largest relative error of one rounding
HALF_ULP = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
TABLE_ROWS = 1500
_TOP = 8
_DEFAULTS: dict[str, Any] = {
    "op": "", "direction": "forward", "module": "", "dtype": "", "calls": 0, "isolated": None, "accumulated": None, "ulps": None,
    "rule": "", "file": "", "line": 0,
}  # fmt: skip


def comparison_page(values: Mapping[str, Any]) -> str:
    """The page, as HTML, of the comparison that `values` describe (see above)."""
    rows = [_DEFAULTS | dict(row) | {"at": at} for at, row in enumerate(values.get("rows", ()), 1)]
    for row in rows:
        for name in ("isolated", "accumulated", "ulps"):
            row[name] = _number(row[name])
    dtype = values.get("dtype") or (values.get("policy") or {}).get("dtype") or "bfloat16"
    figures = []
    for direction in ("forward", "backward"):
        drawn = _figure([row for row in rows if row["direction"] == direction], dtype, direction)
        if drawn:
            figures.append((direction, drawn))
    by_error = sorted(rows, key=lambda row: -(row["isolated"] or 0))
    return render(
        "comparison.html.j2",
        title=values.get("title") or "hmp comparison",
        policy=values.get("policy"),
        notes=list(values.get("notes") or ()),
        dtype=dtype,
        half_ulp=HALF_ULP.get(dtype),
        figures=figures,
        worst=_worst_ops(rows, dtype),
        jumps=_jumps(rows),
        final={direction: _last(rows, direction) for direction in ("forward", "backward")},
        table=by_error[:TABLE_ROWS],
        table_all=len(rows),
    )


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(float(value)) else float(value)


def _figure(rows: Sequence[Mapping[str, Any]], dtype: str, direction: str) -> str:
    """Accumulated error as a line and isolated errors as points of their dtype, against the order of the calls."""
    finite = [row for row in rows if any(row[name] is not None and 0 < row[name] < math.inf for name in ("isolated", "accumulated"))]
    if not finite:
        return ""
    lines: list[charts.Line] = []
    for name, colour, kind in (("accumulated", "--casts", "line"), ("isolated", "", "points")):
        for each in [""] if kind == "line" else sorted({row["dtype"] for row in finite}):
            points = [
                (row["at"], row[name]) for row in finite
                if (not each or row["dtype"] == each) and row[name] is not None and 0 < row[name] < math.inf
            ]  # fmt: skip
            label = "accumulated, in the whole run" if kind == "line" else f"the op's own, in {each or 'another dtype'}"
            if points:
                lines.append(charts.Line(label, colour or charts.variable(each), points, kind == "line"))
    return charts.error_by_depth(lines, HALF_ULP.get(dtype), f"half a {dtype} ulp", f"{direction}-")


def _worst_ops(rows: Sequence[Mapping[str, Any]], low: str) -> list[dict[str, Any]]:
    """The ops whose own error is largest, one line each, with where it is; `try` where the FP32 list may be the better place."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["op"], row["direction"], row["dtype"])
        kept = found.get(key)
        calls = row["calls"] + (kept["calls"] if kept else 0)
        worse = kept is None or (row["isolated"] or 0) > (kept["isolated"] or 0)
        found[key] = {**(row if worse or kept is None else kept), "calls": calls}
    for row in found.values():
        row["try"] = row["dtype"] == low and (row["isolated"] or 0) > 4 * HALF_ULP.get(low, math.inf)
    return sorted((row for row in found.values() if row["isolated"]), key=lambda row: -row["isolated"])[:_TOP]


def _jumps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where the accumulated error grows most from one call to the next, as a factor."""
    found = []
    for direction in ("forward", "backward"):
        known = [row for row in rows if row["direction"] == direction and row["accumulated"]]
        for before, row in itertools.pairwise(known):
            factor = row["accumulated"] / before["accumulated"]
            if factor >= 2 and row["accumulated"] < math.inf:
                found.append({**row, "before": before["accumulated"], "factor": factor})
    return sorted(found, key=lambda row: -row["accumulated"])[:_TOP]


def _last(rows: Sequence[Mapping[str, Any]], direction: str) -> float | None:
    known = [row["accumulated"] for row in rows if row["direction"] == direction and row["accumulated"] is not None]
    return known[-1] if known else None
