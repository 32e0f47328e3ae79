"""The page of a comparison with float32: error by depth, what to try in the lists, the ops with most error, and a table.

Of a comparison with another policy too first the errors of both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..formatting import NOTHING, share
from ..op_owners import Direction
from ..pages.page import (
    Cell,
    Depth,
    Heading,
    Items,
    Line,
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
TABLE_ROWS, TEXT_ROWS = 1500, 20
_TOP = 8
_DIRECTIONS = tuple(Direction)
_ENDS = ("output", "loss", "gradient")


def comparison_page(comparison: Comparison) -> Page:
    """Return what a comparison says."""
    rows, other = comparison.rows, comparison.against
    low = next((row.dtype for row in rows if row.dtype in HALF_ULP), "bfloat16")
    ordered = sorted(rows, key=lambda row: row.order)
    both = [comparison, *([other] if other else [])]
    notes = [f"under {each.policy!r}: {note}" if other else note for each in both for note in _of_whole(each)] + list(comparison.notes)
    changes = comparison.first_changes()
    if other is not None:
        changes += [f"under {other.policy!r}: {each}" for each in other.first_changes()]
    told = (
        "The ops that add most of the rounding error (as a share of the sum of squared errors) and that are not on the FP32 list. Moving "
        "one may cost time: measure both policies with `hmp.benchmark()`, and compare again."
    )
    sections = [
        Section("change", "What to change", "What to change in your lists", [Items(changes), Text(told, is_soft=True)]),
        _by("op", comparison, other),
        _by("module", comparison, other),
        _depth(comparison, ordered, low),
        _calls(rows),
    ]
    return Page(
        title=f"{comparison.policy} against float32" if other is None else f"{comparison.policy} and {other.policy} against float32",
        verdict=" ".join([_verdict(comparison, low), *([f"{_verdict_of_whole(other)}."] if other else [])]),
        made=made_of(vars(comparison)),
        policies=[(f"policy {comparison.policy}", f"{low}; {comparison.loss_source}")],
        cards=_cards(comparison, low),
        opening=[Items(notes, is_notes=True)] if notes else [],
        sections=sections,
    )


def _of_whole(comparison: Comparison) -> list[str]:
    """Return how far tokens are, how far the run is from one that hmp has not touched, and if the model goes another way there."""
    lines = [] if comparison.tokens is None else [f"log-probabilities {comparison.tokens}"]
    output, loss = comparison.untouched_output, comparison.untouched_loss
    far = [each for each in (output, loss) if each is not None]
    if not far:
        why = comparison.untouched_why_not
        return [*lines, *([f"not compared with a run without hmp: {why}"] if why else [])]
    told = [] if output is None else [f"output {error_text(output)}"]
    if loss is not None:
        told.append(f"loss {error_text(loss)} ({comparison.untouched_loss_value:.5g} became {comparison.loss_value:.5g})")
    lines += [f"relative distance from a float32 run without hmp: {', '.join(told)}"]
    if max(far) > _OTHER_WAY * max(comparison.output or 0.0, comparison.loss or 0.0, _LEAST):
        lines.append(
            "that is more than the errors of the ops explain: the model computes something else in float32, because it chooses a constant "
            "or a branch by the dtype, such as torch.finfo(x.dtype).eps"
        )
    return lines


# The model took another path if it is farther than this many times its errors, of at least _LEAST, from the run without hmp.
_OTHER_WAY, _LEAST = 3, 1e-3


def _cards(comparison: Comparison, low: str) -> list[tuple[str, str, str]]:
    other, found = comparison.against, []
    for name in _ENDS:
        value = getattr(comparison, name)
        of = "not computed" if value is None else "relative to float32"
        if name == "loss" and value is not None and comparison.loss_value is not None:
            of = f"of {comparison.loss_value:.4g}"
        of += f"; {error_text(getattr(other, name))} under {other.policy}" if other else ""
        found.append((f"error of the {name}", error_text(value), of))
    worst = max(comparison.rows, key=_own, default=None)
    own = (error_text(worst.isolated), f"{worst.op}, isolated") if worst is not None and worst.isolated else ("-", "none")
    found.append(("largest error of one op", *own))
    if comparison.gradient_packed is not None:
        of = "compared with the same step without packing"
        found.append(("error of the gradient by packing alone", error_text(comparison.gradient_packed), of))
    if low in HALF_ULP:
        found.append((f"one rounding to {low}", error_text(HALF_ULP[low]), "at most: half an ulp"))
    return found


def _by(what: str, comparison: Comparison, other: Comparison | None) -> Section:
    """Return the largest errors of each op or module, next to those under the other policy."""
    groups, others = ([each.by_op() if what == "op" else each.by_module() for each in (comparison, other) if each] + [[]])[:2]
    heads = () if other is None else (f">{other.policy} isolated", f">{other.policy} accumulated")
    rows = []
    for group, beside in paired(groups, others):
        name = next(each.name for each in (group, beside) if each is not None)
        cells = [number(None, NOTHING)] * 6
        if group is not None:
            errors = ((group.isolated, 1), (group.isolated_ulps, 256), (group.accumulated, 1), (group.accumulated_ulps, 256))
            cells = [whole(group.calls), *(at_most(*each) for each in errors), part(group.share, 1)]
        if other is not None:
            cells += [number(None, NOTHING)] * 2 if beside is None else [at_most(beside.isolated, 1), at_most(beside.accumulated, 1)]
        rows.append([module(name), *cells])
    told = (
        "Isolated is the error that an op adds, accumulated the error including that of all earlier ops. Each is the largest of all calls."
    )
    columns = (what, ">calls", ">isolated", ">ulps", ">accumulated", ">ulps", ">share", *heads)
    table = Table(columns, rows, label=f"Errors by {what}", where=f"the page and .by_{what}() have them all", most=TEXT_ROWS)
    return Section(f"by-{what}", f"By {what}", f"By {what}", [table, Text(told, is_soft=True)])


def at_most(value: float, limit: int) -> Cell:
    """Beyond its own size an error says no more than that nothing is left of the value: often one that float32 cancels to zero."""
    return error(value) if value <= limit else number(value, f">{limit}")


def _depth(comparison: Comparison, ordered: Sequence[ErrorRow], low: str) -> Section:
    found: list[Part] = [
        Text(
            "Red: the accumulated error of each op against float32 (points), and its median over nine ops (line). The other points are the "
            "isolated errors. At 1 the result has nothing in common with float32's, often because float32's is close to zero."
        )
    ]
    for direction in _DIRECTIONS:
        figure = _figure(ordered, low, direction)
        if figure is not None:
            found += [Heading(direction), figure]
    if len(found) == 1:
        found.append(Text("No row has an error above zero."))
    under = f" under {comparison.policy}" if comparison.against else ""
    return Section("depth", "Error by depth", f"Error by depth{under}", found, is_long=True)


def _calls(rows: Sequence[ErrorRow]) -> Section:
    shown = sorted(rows, key=_own, reverse=True)[:TABLE_ROWS]
    lines = [
        [op(row.op), op(row.aten), whole(row.order), Cell(row.direction), chips(row.dtype), Cell(row.listed or "-"), module(row.module),
         whole(row.calls), error(row.isolated), error(row.isolated_ulps), error(row.accumulated)]
        for row in shown
    ]  # fmt: skip
    columns = ("op", "ATen op", ">order", "direction", "result", "list", "module", ">calls", ">isolated", ">in ulps", ">accumulated")
    table = Table(
        columns,
        lines,
        label="Errors of every op, module by module",
        note=left_out(shown, len(rows), "with the largest isolated errors", "`to_dict()`"),
        filter="op, module, dtype",
        choice="Direction",
        choices=_DIRECTIONS,
        groups=[row.direction for row in shown],
    )
    return Section("calls", "All calls", "All calls", [table], is_long=True)


def _own(row: ErrorRow) -> float:
    """Return the largest error of the op by itself, 0 where it is not known."""
    return row.isolated or 0.0


def _figure(rows: Sequence[ErrorRow], low: str, direction: str) -> Depth | None:
    """Accumulated error as a line and the ops' own errors as points of their dtype, in the order of the calls."""
    rows = [row for row in rows if row.direction == direction]
    lines: list[Line] = []
    # beyond 1 an error says that nothing is left of the value
    accumulated = [(at, min(row.accumulated, 1.0)) for at, row in enumerate(rows, 1) if row.accumulated]
    if accumulated:
        lines.append(Line("accumulated", "casts", accumulated, 2.0))
        lines.append(Line("its median", "casts", _median(accumulated)))
    for dtype in sorted({row.dtype for row in rows}):
        own = [(at, min(row.isolated, 1.0)) for at, row in enumerate(rows, 1) if row.isolated and row.dtype == dtype]
        if own:
            lines.append(Line(f"isolated, {dtype} result", dtype, own, 4.0))
    if not lines:
        return None
    worst = max(range(len(rows)), key=lambda at: _own(rows[at]))
    own_error = min(_own(rows[worst]), 1.0)
    named = (worst + 1, own_error, _named(rows[worst])) if own_error > 2 * HALF_ULP.get(low, 0) else None
    return Depth(lines, HALF_ULP.get(low), f"half a {low} ulp", named)


def _median(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points with the median of four neighbours on each side.

    By-products such as a norm's statistics err more than what goes on.
    """
    return [(x, statistics.median(y for _, y in points[max(at - 4, 0) : at + 5])) for at, (x, _) in enumerate(points)]


def _named(row: ErrorRow) -> str:
    return f"{row.op} in {row.module or 'no module'}"


def _verdict(comparison: Comparison, low: str) -> str:
    """Return how far the whole is from float32, and which op rounds most, in a sentence."""
    first = _verdict_of_whole(comparison)
    if all(getattr(comparison, name) is None for name in _ENDS):
        return f"{first}."
    if not comparison.advice:
        return f"{first}; no op is responsible for most of it."
    name, squares = comparison.advice[0]
    return f"{first}; {name} makes {share(squares, 1)} of the rounding error."


def _verdict_of_whole(comparison: Comparison) -> str:
    known = [(name, value) for name in _ENDS if (value := getattr(comparison, name)) is not None]
    broken = [name for name, value in known if not math.isfinite(value)]
    if not known:
        return "Neither output, loss nor gradient was compared"
    if broken:
        return f"Under {comparison.policy} the {_and(broken)} cannot be compared with float32's: NaN, Inf, or a float32 value of zero"
    return f"Under {comparison.policy} {_and([f'the {name} is {_percent(value)}' for name, value in known])} away from float32's"


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _percent(value: float) -> str:
    return "0 %" if value == 0 else f"{100 * value:.2g} %" if 1e-6 <= value < 1 else "under 0.0001 %" if value < 1 else "100 % or more"
