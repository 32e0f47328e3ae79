"""The page of a comparison with float32: error by depth, what to try in the lists, the ops with most error, and a table.

Of a comparison with another policy too first the errors of both.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.formatting import share
from ..pages import charts
from ..pages.page import (
    Cell,
    Figure,
    Heading,
    Items,
    Page,
    Part,
    Section,
    Table,
    Text,
    chips,
    error,
    error_text,
    left_out,
    made_of,
    module,
    number,
    op,
    part,
    whole,
)
from .comparison import Comparison, ErrorRow, paired

# half a unit in the last place of 1.0: the largest relative error of one rounding
HALF_ULP = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
TABLE_ROWS = 1500
_TOP, _PAIRS = 8, 100
_DIRECTIONS = ("forward", "backward")
_ENDS = ("output", "loss", "gradient")


def comparison_page(comparison: Comparison) -> str:
    """Return the page, as HTML, of a comparison."""
    rows, other = comparison.rows, comparison.against
    low = next((row.dtype for row in rows if row.dtype in HALF_ULP), "bfloat16")
    ordered = sorted(rows, key=lambda row: row.order)
    advices = _advices(comparison)
    sections = [
        *([_both(comparison, other)] if other else []),
        _depth(comparison, ordered, low),
        _changes(advices, low),
        _worst(rows, ordered, low),
        _calls(rows),
    ]
    return Page(
        title=f"{comparison.policy} against float32" if other is None else f"{comparison.policy} and {other.policy} against float32",
        verdict=" ".join([_verdict(comparison, low, advices), *([f"{_verdict_of_whole(other)}."] if other else [])]),
        made=made_of(vars(comparison)),
        policies=[(f"policy {comparison.policy}", f"{low}; {comparison.loss_source}")],
        cards=_cards(comparison, low),
        opening=[Items(comparison.notes, is_notes=True)] if comparison.notes else [],
        sections=sections,
    ).html()


def _cards(comparison: Comparison, low: str) -> list[tuple[str, str, str]]:
    other, found = comparison.against, []
    for name in _ENDS:
        value = getattr(comparison, name)
        of = "not computed" if value is None else "relative to float32"
        if name == "loss" and value is not None and comparison.loss_value is not None:
            of = f"of {comparison.loss_value:.4g}"
        of += f"; {error_text(getattr(other, name))} under {other.policy}" if other else ""
        found.append((f"error of the {name}", error_text(value), of))
    tokens = comparison.tokens
    if tokens is not None:
        of = f"nats on average, {error_text(tokens.error_max)} at most; {tokens.tokens:,} {tokens.of}"
        found.append(("error of a log-probability", error_text(tokens.error_mean), of))
        found.append(("KL divergence from float32", error_text(tokens.kl_mean), f"nats on average, {error_text(tokens.kl_max)} at most"))
    worst = _worst_ops(comparison.rows)
    own = (error_text(worst[0].isolated), f"{worst[0].op}, by itself") if worst else ("-", "none, by itself")
    found.append(("largest error of one op", *own))
    if comparison.gradient_packed is not None:
        of = "compared with the same step where nothing is packed"
        found.append(("gradient, by packing alone", error_text(comparison.gradient_packed), of))
    if low in HALF_ULP:
        found.append((f"one rounding to {low}", error_text(HALF_ULP[low]), "at most: half an ulp"))
    return found


def _both(comparison: Comparison, other: Comparison) -> Section:
    found: list[Part] = [
        Text(
            "The errors of each policy compared with float32: of an op by itself, and all that has come together up to its result; the "
            "largest of all calls."
        )
    ]
    for what, pairs in (
        ("op", paired(comparison.by_op(), other.by_op())),
        ("module", paired(comparison.by_module(), other.by_module())),
    ):
        columns = [what, *(f">{policy}, {of}" for policy in (comparison.policy, other.policy) for of in ("its own error", "accumulated"))]
        rows = []
        for pair in pairs[:_PAIRS]:
            errors = [error(getattr(group, of, None)) for group in pair for of in ("isolated", "accumulated")]
            rows.append([module(next(each.name for each in pair if each is not None)), *errors])
        note = left_out(rows, len(pairs), "with most error", "`to_dict()`")
        found += [Heading(f"By {what}"), Table(columns, rows, note=note)]
    return Section("against", "Both policies", "Both policies", found)


def _depth(comparison: Comparison, ordered: Sequence[ErrorRow], low: str) -> Section:
    found: list[Part] = [
        Text(
            "Red is the error that has come together up to an op, compared with a run in float32: small points for each op, and their "
            "median over nine ops as a line. The other points are what each op adds by itself, on the inputs that it got. At 1 nothing "
            "is left of a value, often one that float32 cancels to zero."
        )
    ]
    for direction in _DIRECTIONS:
        figure = _figure(ordered, low, direction)
        if figure is not None:
            found += [Heading(direction), figure]
    if len(found) == 1:
        found.append(Text("No row has an error above zero."))
    under = f" under {comparison.policy}" if comparison.against else ""
    return Section("depth", "Error by depth", f"Error by depth{under}", found)


def _changes(advices: Sequence[Mapping[str, Any]], low: str) -> Section:
    if not advices:
        return Section("change", "What to change", "What to change in your lists", [Text(f"No op in {low} stands out.")])
    rows = []
    for item in advices:
        to = "off the FP8 list" if item["changes"][0][1] == "fp8.txt" else "on the FP32 list"
        changes = ", ".join(f"{sign}{item['op']} in {file}" for sign, file in item["changes"])
        worst = item["worst"]
        own, where = (worst.isolated, worst.module) if worst is not None else (None, "")
        rows.append([op(f"Try {item['op']} {to}"), Cell(changes), part(item["share"], 1), error(own), module(where)])
    told = (
        "The ops that no list keeps in float32 and that have the largest part of all rounding errors (squared, as independent errors add "
        "up). Moving one costs time: measure both policies with `hmp.benchmark()`, and compare again."
    )
    table = Table(("op", "change", ">of the squared errors", ">at most by itself", "in"), rows)
    return Section("change", "What to change", "What to change in your lists", [Text(told), table])


def _worst(rows: Sequence[ErrorRow], ordered: Sequence[ErrorRow], low: str) -> Section:
    worst, jumps = _worst_ops(rows), _jumps(ordered)
    found: list[Part] = [
        Text(
            f"Chips say what dtype a result has, not what it was computed in: in backward an op in {low} gives float32 gradients to "
            "parameters that are float32."
        )
    ]
    if worst:
        lines = [
            [op(row.op), Cell(row.direction), chips(row.dtype), module(row.module), whole(row.calls), error(row.isolated),
             error(row.isolated_ulps), part(row.share, 1)]
            for row in worst
        ]  # fmt: skip
        found.append(Table(("op", "direction", "result", "module", ">calls", ">its own error", ">in ulps", ">share of all"), lines))
    else:
        found.append(Text("No op has an error of its own."))
    if jumps:
        lines = [
            [op(row.op), chips(row.dtype), module(row.module), error(before), error(row.accumulated), number(factor, f"{factor:.3g}")]
            for before, row, factor in jumps
        ]
        told = (
            "From one call to the next it at least doubles here. An op with little error of its own passes on what it got, or gets it from "
            "elsewhere: look at its inputs."
        )
        columns = ("op", "result", "module", ">before", ">accumulated", ">times")
        found += [Heading("Where the error of the forward grows"), Text(told), Table(columns, lines)]
    return Section("worst", "Worst ops", "The ops with most error", found)


def _calls(rows: Sequence[ErrorRow]) -> Section:
    shown = sorted(rows, key=_own, reverse=True)[:TABLE_ROWS]
    lines = [
        [op(row.op), op(row.aten), whole(row.order), Cell(row.direction), chips(row.dtype), Cell(row.listed or "-"), module(row.module),
         whole(row.calls), error(row.isolated), error(row.isolated_ulps), error(row.accumulated)]
        for row in shown
    ]  # fmt: skip
    columns = ("op", "ATen op", ">order", "direction", "result", "list", "module", ">calls", ">its own error", ">in ulps", ">accumulated")
    table = Table(
        columns,
        lines,
        label="Every op in every place, with its errors",
        note=left_out(shown, len(rows), "with most error of their own", "`to_dict()`"),
        filter="op, module, dtype",
        choice="Direction",
        choices=_DIRECTIONS,
        groups=[row.direction for row in shown],
    )
    return Section("calls", "All calls", "All calls", [table])


def _own(row: ErrorRow) -> float:
    """Return the largest error of the op by itself, 0 where it is not known."""
    return row.isolated or 0.0


def _figure(rows: Sequence[ErrorRow], low: str, direction: str) -> Figure | None:
    """Accumulated error as a line and the ops' own errors as points of their dtype, in the order of the calls."""
    rows = [row for row in rows if row.direction == direction]
    lines: list[charts.Line] = []
    # beyond 1 an error says that nothing is left of the value
    accumulated = [(at, min(row.accumulated, 1.0)) for at, row in enumerate(rows, 1) if row.accumulated]
    if accumulated:
        lines.append(charts.Line("accumulated", "casts", accumulated, 2.0))
        lines.append(charts.Line("its median", "casts", _median(accumulated)))
    for dtype in sorted({row.dtype for row in rows}):
        own = [(at, min(row.isolated, 1.0)) for at, row in enumerate(rows, 1) if row.isolated and row.dtype == dtype]
        if own:
            lines.append(charts.Line(f"the op's own, {dtype} result", dtype, own, 4.0))
    if not lines:
        return None
    worst = max(range(len(rows)), key=lambda at: _own(rows[at]))
    own_error = min(_own(rows[worst]), 1.0)
    named = (worst + 1, own_error, _named(rows[worst])) if own_error > 2 * HALF_ULP.get(low, 0) else None
    return charts.error_by_depth(lines, HALF_ULP.get(low), f"half a {low} ulp", named)


def _median(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points with the median of four neighbours on each side.

    By-products such as a norm's statistics err more than what goes on.
    """
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
    """Return the ops that are worth a try on the FP32 list, with the lines to change, and where they err most."""
    found = []
    for name, squares in comparison.advice[:_TOP]:
        own = [row for row in comparison.rows if row.op == name]
        changes = [("-", f"{cast}.txt") for cast in ("bf16", "promote") if any(row.listed == cast for row in own)] + [("+", "fp32.txt")]
        if any(row.listed == "fp8" for row in own):
            changes = [("-", "fp8.txt"), ("+", "bf16.txt")]  # FP8 rounds most; the low-precision dtype is tried before float32
        found.append({"op": name, "share": squares, "changes": changes, "worst": max(own, key=_own, default=None)})
    return found


def _worst_ops(rows: Sequence[ErrorRow]) -> list[ErrorRow]:
    """Return the ops whose own error is largest, one line for each dtype and direction, with where it is."""
    found: dict[tuple[str, str, str], ErrorRow] = {}
    for row in rows:
        kept = found.get((row.op, row.direction, row.dtype))
        if kept is not None:
            row = replace(max(kept, row, key=_own), calls=row.calls + kept.calls, share=row.share + kept.share)
        found[row.op, row.direction, row.dtype] = row
    return sorted((row for row in found.values() if row.isolated), key=_own, reverse=True)[:_TOP]


def _jumps(rows: Sequence[ErrorRow]) -> list[tuple[float, ErrorRow, float]]:
    """Return where the accumulated error of the forward at least doubles from one call to the next, the largest first.

    Each with the error before, and how many times that it is.
    """
    known = [row for row in rows if row.direction == "forward" and row.accumulated]
    found = [
        (before.accumulated, row, row.accumulated / before.accumulated)
        for before, row in itertools.pairwise(known)
        if 2 * before.accumulated <= row.accumulated < math.inf
    ]
    return sorted(found, key=lambda each: -each[1].accumulated)[:_TOP]
