"""The page of a comparison with float32: error by depth, what to try in the lists, the ops with most error, and a table; of a comparison
with another policy too first the errors of both."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.formatting import share
from ..pages import charts
from ..pages.html import render
from .comparison import Comparison, ErrorRow, paired

# half a unit in the last place of 1.0: the largest relative error of one rounding
HALF_ULP = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
TABLE_ROWS = 1500
_TOP = 8
_DIRECTIONS = ("forward", "backward")
_ENDS = ("output", "loss", "gradient")


def comparison_page(comparison: Comparison) -> str:
    """The page, as HTML, of a comparison."""
    rows = comparison.rows
    low = next((row.dtype for row in rows if row.dtype in HALF_ULP), "bfloat16")
    ordered = sorted(rows, key=lambda row: row.order)
    advices = _advices(comparison)
    other = comparison.against
    both = (
        [("op", paired(comparison.by_op(), other.by_op())), ("module", paired(comparison.by_module(), other.by_module()))] if other else []
    )
    return render(
        "comparison.html.j2",
        title=f"{comparison.policy} against float32" if other is None else f"{comparison.policy} and {other.policy} against float32",
        verdict=" ".join([_verdict(comparison, low, advices), *([f"{_verdict_of_whole(other)}."] if other else [])]),
        made=vars(comparison),
        comparison=comparison,
        ends=[(name, getattr(comparison, name), other and getattr(other, name)) for name in _ENDS],
        against=other,
        pairs=both,
        low=low,
        half_ulp=HALF_ULP.get(low),
        figures=[(direction, figure) for direction in _DIRECTIONS if (figure := _figure(ordered, low, direction))],
        advices=advices,
        worst=_worst_ops(rows),
        jumps=_jumps(ordered),
        table=sorted(rows, key=_own, reverse=True)[:TABLE_ROWS],
    )


def _own(row: ErrorRow) -> float:
    """The largest error of the op by itself, 0 where it is not known."""
    return row.isolated or 0.0


def _figure(rows: Sequence[ErrorRow], low: str, direction: str) -> str:
    """Accumulated error as a line and the ops' own errors as points of their dtype, in the order of the calls."""
    rows = [row for row in rows if row.direction == direction]
    lines: list[charts.Line] = []
    # beyond 1 an error says that nothing is left of the value
    accumulated = [(at, min(row.accumulated, 1.0)) for at, row in enumerate(rows, 1) if row.accumulated]
    if accumulated:
        titles = [f"{_named(row)}: {row.accumulated:.2g} accumulated" for row in rows if row.accumulated]
        lines.append(charts.Line("accumulated", "--casts", accumulated, 2.0, titles))
        lines.append(charts.Line("its median", "--casts", _median(accumulated), 0.0))
    for dtype in sorted({row.dtype for row in rows}):
        own = [(at, min(row.isolated, 1.0)) for at, row in enumerate(rows, 1) if row.isolated and row.dtype == dtype]
        if own:
            titles = [f"{_named(row)}: {row.isolated:.2g} by itself" for row in rows if row.isolated and row.dtype == dtype]
            lines.append(charts.Line(f"the op's own, {dtype} result", charts.variable(dtype), own, 4.0, titles))
    if not lines:
        return ""
    worst = max(range(len(rows)), key=lambda at: _own(rows[at]))
    own_error = min(_own(rows[worst]), 1.0)
    named = (worst + 1, own_error, _named(rows[worst])) if own_error > 2 * HALF_ULP.get(low, 0) else None
    return charts.error_by_depth(lines, HALF_ULP.get(low), f"half a {low} ulp", named, f"{direction}-")


def _median(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points with the median of four neighbours on each side: by-products such as a norm's statistics err more than what goes on."""
    return [(x, statistics.median(y for _, y in points[max(at - 4, 0) : at + 5])) for at, (x, _) in enumerate(points)]


def _named(row: ErrorRow) -> str:
    return f"{row.op} in {row.module or 'no module'}"


def _verdict(comparison: Comparison, low: str, advices: Sequence[Mapping[str, Any]]) -> str:
    """Return how far the whole is from float32, and which op rounds most, in a sentence."""
    first = _verdict_of_whole(comparison)
    if all(getattr(comparison, name) is None for name in _ENDS):
        return f"{first}."
    if not advices:
        return f"{first}; no op in {low} stands out."
    return f"{first}; {advices[0]['op']} makes {share(advices[0]['share'], 1)} of the rounding error."


def _verdict_of_whole(comparison: Comparison) -> str:
    known = [(name, value) for name in _ENDS if (value := getattr(comparison, name)) is not None]
    broken = [name for name, value in known if not math.isfinite(value)]
    if not known:
        return "Nothing of the whole was compared"
    if broken:
        return f"Under {comparison.policy} the {_and(broken)} cannot be compared with float32's: NaN, Inf, or a float32 value of zero"
    return f"Under {comparison.policy} {_and([f'the {name} is {_percent(value)}' for name, value in known])} away from float32's"


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _percent(value: float) -> str:
    return "0 %" if value == 0 else f"{100 * value:.2g} %" if 1e-6 <= value < 1 else "under 0.0001 %" if value < 1 else "100 % or more"


def _advices(comparison: Comparison) -> list[dict[str, Any]]:
    """The ops that are worth a try on the FP32 list, with the lines to change, and where they err most."""
    found = []
    for op, part in comparison.advice[:_TOP]:
        own = [row for row in comparison.rows if row.op == op]
        changes = [("-", f"{cast}.txt") for cast in ("bf16", "promote") if any(row.listed == cast for row in own)] + [("+", "fp32.txt")]
        if any(row.listed == "fp8" for row in own):
            changes = [("-", "fp8.txt"), ("+", "bf16.txt")]  # FP8 rounds most; the low dtype is tried before float32
        found.append({"op": op, "share": part, "changes": changes, "worst": max(own, key=_own, default=None)})
    return found


def _worst_ops(rows: Sequence[ErrorRow]) -> list[ErrorRow]:
    """The ops whose own error is largest, one line for each dtype and direction, with where it is."""
    found: dict[tuple[str, str, str], ErrorRow] = {}
    for row in rows:
        kept = found.get((row.op, row.direction, row.dtype))
        if kept is not None:
            row = replace(max(kept, row, key=_own), calls=row.calls + kept.calls, share=row.share + kept.share)
        found[row.op, row.direction, row.dtype] = row
    return sorted((row for row in found.values() if row.isolated), key=_own, reverse=True)[:_TOP]


def _jumps(rows: Sequence[ErrorRow]) -> list[dict[str, Any]]:
    """Where the accumulated error of the forward at least doubles from one call to the next, the largest first."""
    known = [row for row in rows if row.direction == "forward" and row.accumulated]
    found = [
        {**vars(row), "before": before.accumulated, "factor": row.accumulated / before.accumulated}
        for before, row in itertools.pairwise(known)
        if 2 * before.accumulated <= row.accumulated < math.inf
    ]
    return sorted(found, key=lambda row: -row["accumulated"])[:_TOP]
