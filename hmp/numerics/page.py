"""The page of a comparison with float32: error by depth, what to try in the lists, the ops with most error, and a table.

`comparison_page(values)` takes plain values, those of a Comparison's `to_dict()`; what is not known may be left out or is None:

    policy       its name, or `Policy.to_dict()`
    output, loss, gradient    accumulated relative errors of the whole: of the model's output, the loss, the gradients as one vector
    loss_value, loss_source   the loss, and what it was
    advice       [{"op": ..., "share": ...}]: what to move to the FP32 list first, or to take off the FP8 list
    notes        sentences that a reader must know
    in_low       the same of a run with the low dtype in the place of FP8; None without FP8
    model, device, date, hmp, torch    the model's class, where and when it was compared, and the versions
    rows         one for each op, or each ATen op of one, in one module and direction:
        op, aten      the op as lists spell it, and the ATen op that was seen
        direction     "forward" or "backward"
        module        path of the module
        dtype         of the results
        listed        "fp8", "bf16", "fp32", "promote", or "" for no list
        calls         how often it was called
        isolated, isolated_ulps          largest relative error of the op alone, on the inputs that it got; None where it is not known
        accumulated, accumulated_ulps    largest relative error of its result beside that of the float32 run
        share         its part of the sum of the squared isolated errors
        order         place of its first call among all rows; without it there is no error by depth

Errors may be infinite, and "inf" is read as that.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..formatting import share
from ..lists import can_be_listed
from ..report.page import charts, model, render

# half a unit in the last place of 1.0: the largest relative error of one rounding
HALF_ULP = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
LEAST_SHARE = 0.05  # of the squared errors: what is below it is not worth a line in a list
TABLE_ROWS = 1500
_TOP = 8
_DIRECTIONS = ("forward", "backward")
_NUMBERS = ("isolated", "isolated_ulps", "accumulated", "accumulated_ulps", "share")
_DEFAULTS: dict[str, Any] = {
    "op": "", "aten": "", "direction": "forward", "module": "", "dtype": "", "listed": "", "calls": 0, "order": None,
    **dict.fromkeys(_NUMBERS),
}  # fmt: skip


def comparison_page(values: Mapping[str, Any]) -> str:
    """The page, as HTML, of the comparison that `values` describe (see above)."""
    rows = [_DEFAULTS | {name: row[name] for name in _DEFAULTS if name in row} for row in values.get("rows") or ()]
    for row in rows:
        row |= {name: _number(row[name]) for name in _NUMBERS}
    policy = values.get("policy") or {}
    policy = {"name": policy} if isinstance(policy, str) else policy
    low = policy.get("dtype") or next((row["dtype"] for row in rows if row["dtype"] in HALF_ULP), "bfloat16")
    ordered = sorted((row for row in rows if row["order"] is not None), key=lambda row: row["order"])
    in_low = values.get("in_low") or {}
    by_error = sorted(rows, key=lambda row: -_or_zero(row["isolated"]))
    return render(
        "comparison.html.j2",
        title=f"{policy['name']} against float32" if policy.get("name") else "hmp comparison",
        verdict=_verdict(values, policy.get("name") or "the policy", low, rows),
        made={name: values.get(name) for name in ("model", "device", "date", "hmp", "torch")},
        policy=policy,
        ends=[(name, _number(values.get(name)), _number(in_low.get(name))) for name in ("output", "loss", "gradient")],
        loss_value=_number(values.get("loss_value")),
        loss_source=values.get("loss_source") or "",
        notes=list(values.get("notes") or ()),
        low=low,
        half_ulp=HALF_ULP.get(low),
        figures=[(direction, figure) for direction in _DIRECTIONS if (figure := _figure(ordered, low, direction))],
        is_ordered=bool(ordered),
        advices=_advices(values.get("advice") or (), rows),
        worst=_worst_ops(rows),
        jumps=_jumps(ordered),
        table=by_error[:TABLE_ROWS],
        table_all=len(rows),
    )


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(float(value)) else float(value)


def _or_zero(value: float | None) -> float:
    return value or 0.0


def _figure(rows: Sequence[Mapping[str, Any]], low: str, direction: str) -> str:
    """Accumulated error as a line and the ops' own errors as points of their dtype, in the order of the calls."""
    rows = [row for row in rows if row["direction"] == direction]
    lines: list[charts.Line] = []
    # beyond 1 an error says that nothing is left of the value
    accumulated = [(at, min(row["accumulated"], 1.0)) for at, row in enumerate(rows, 1) if row["accumulated"]]
    if accumulated:
        titles = [f"{_named(row)}: {row['accumulated']:.2g} accumulated" for row in rows if row["accumulated"]]
        lines.append(charts.Line("accumulated", "--casts", accumulated, 2.0, titles))
        lines.append(charts.Line("its median", "--casts", _median(accumulated), 0.0))
    for dtype in sorted({row["dtype"] for row in rows}):
        own = [(at, min(row["isolated"], 1.0)) for at, row in enumerate(rows, 1) if row["isolated"] and row["dtype"] == dtype]
        if own:
            titles = [f"{_named(row)}: {row['isolated']:.2g} by itself" for row in rows if row["isolated"] and row["dtype"] == dtype]
            name = f"the op's own, {dtype or 'another'} result" + ("" if dtype else " dtype")
            lines.append(charts.Line(name, charts.variable(dtype), own, 4.0, titles))
    if not lines:
        return ""
    worst = max(range(len(rows)), key=lambda at: _or_zero(rows[at]["isolated"]))
    own_error = min(_or_zero(rows[worst]["isolated"]), 1.0)
    named = (worst + 1, own_error, _named(rows[worst])) if own_error > 2 * HALF_ULP.get(low, 0) else None
    return charts.error_by_depth(lines, HALF_ULP.get(low), f"half a {low} ulp", named, f"{direction}-")


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['op']} in {row['module'] or 'no module'}"


def _verdict(values: Mapping[str, Any], policy: str, low: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """How far the whole is from float32, and which op rounds most, in a sentence."""
    known = [(name, value) for name in ("output", "loss", "gradient") if (value := _number(values.get(name))) is not None]
    broken = [name for name, value in known if not math.isfinite(value)]
    if not known:
        return "Nothing of the whole was compared."
    if broken:
        first = f"Under {policy} the {_and(broken)} cannot be compared with float32's: NaN, Inf, or a float32 value of zero"
    else:
        first = f"Under {policy} {_and([f'the {name} is {_percent(value)}' for name, value in known])} away from float32's"
    worst = next(iter(_advices(values.get("advice") or (), rows)), None)
    if worst is None:
        return f"{first}; no op in {low} stands out."
    return f"{first}; {worst['op']} makes {share(worst['share'], 1)} of the rounding error."


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _percent(value: float) -> str:
    return "0 %" if value == 0 else f"{100 * value:.2g} %" if 1e-6 <= value < 1 else "under 0.0001 %" if value < 1 else "100 % or more"


def _median(points: Sequence[tuple[int, float]], around: int = 4) -> list[tuple[int, float]]:
    """The points with the median of their neighbours: by-products such as a norm's statistics err more than what goes on."""
    return [(x, statistics.median(y for _, y in points[max(at - around, 0) : at + around + 1])) for at, (x, _) in enumerate(points)]


def _advices(advice: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ops that are worth a try on the FP32 list, with the lines to change, and where they err most."""
    found = []
    for each in advice:
        op, part = each["op"], _or_zero(_number(each["share"]))
        if part < LEAST_SHARE or not can_be_listed(op):
            continue
        own = [row for row in rows if row["op"] == op]
        if own and all(row["dtype"] == "float32" and row["listed"] not in ("fp8", "bf16") for row in own):
            continue  # it computes in float32 already
        listed = sorted({row["listed"] for row in own if row["listed"] in ("bf16", "promote")})
        worst = max(own, key=lambda row: _or_zero(row["isolated"]), default=None)
        changes = [("-", f"{cast}.txt") for cast in listed] + [("+", "fp32.txt")]
        if any(row["listed"] == "fp8" for row in own):
            changes = [("-", "fp8.txt"), ("+", "bf16.txt")]  # FP8 rounds most; the low dtype is tried before float32
        found.append({"op": op, "share": part, "changes": changes, "worst": worst, "modules": model.in_short(r["module"] for r in own)})
    return found[:_TOP]


def _worst_ops(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ops whose own error is largest, one line for each dtype and direction, with where it is."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["op"], row["direction"], row["dtype"])
        kept = found.get(key)
        if kept is None:
            found[key] = {**row, "share": _or_zero(row["share"])}
            continue
        sums = {"calls": row["calls"] + kept["calls"], "share": kept["share"] + _or_zero(row["share"])}
        found[key] = {**(row if _or_zero(row["isolated"]) > _or_zero(kept["isolated"]) else kept), **sums}
    return sorted((row for row in found.values() if row["isolated"]), key=lambda row: -row["isolated"])[:_TOP]


def _jumps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where the accumulated error of the forward at least doubles from one call to the next, the largest first."""
    known = [row for row in rows if row["direction"] == "forward" and row["accumulated"]]
    found = [
        {**row, "before": before["accumulated"], "factor": row["accumulated"] / before["accumulated"]}
        for before, row in itertools.pairwise(known)
        if 2 * before["accumulated"] <= row["accumulated"] < math.inf
    ]
    return sorted(found, key=lambda row: -row["accumulated"])[:_TOP]
