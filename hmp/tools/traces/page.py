"""The page that compares two captures: the gap by depth, where it grows, and every module with what it computed in."""

from __future__ import annotations

import math

from ..pages.page import (
    Cell,
    Depth,
    Items,
    Line,
    Page,
    Part,
    Section,
    Table,
    Text,
    bar,
    error,
    error_text,
    flow,
    left_out,
    made_of,
    module,
    whole,
)
from .compare import CaptureComparison, Computed, Gap

TABLE_ROWS = 1500


def captures_page(comparison: CaptureComparison) -> Page:
    """Return what a comparison of two captures says."""
    a, b = comparison.a, comparison.b
    low = max((gap for gap in comparison.gaps if gap.relative is not None), key=lambda gap: gap.rounding, default=None)
    cards = [
        (name, error_text(gap.relative if gap else None), gap.named if gap else "nowhere")
        for name, gap in (
            ("first difference", comparison.first),
            ("beyond one rounding", comparison.beyond_rounding),
            ("the model's output", comparison.last),
        )
    ]
    if low is not None and low.rounding:
        cards.append(("one rounding", error_text(low.rounding), "at most, to the narrowest output dtype"))
    return Page(
        title=f"{a.name} against {b.name}",
        verdict="; ".join(comparison.verdict()).replace("they", "They", 1) + ".",
        made=made_of(b.about),
        policies=[(side.name, str(side)) for side in (a, b)],
        cards=cards,
        opening=[Items(comparison.notes, is_notes=True)] if comparison.notes else [],
        sections=[_depth(comparison, low), _computed(comparison), _modules(comparison)],
    )


def _side(side: Computed) -> Cell:
    return flow(", ".join(side.inputs), side.output) if not side.weights else Cell(str(side))


def _depth(comparison: CaptureComparison, low: Gap | None) -> Section:
    told = (
        f"The relative difference of each module's output, ||a - b|| / ||b||, where b is {comparison.b.name}'s. In the order in which the "
        "modules returned: inner modules before the modules that contain them."
    )
    found: list[Part] = [Text(told, is_soft=True), _figure(comparison, low) or Text("No output differs.", is_soft=True)]
    for name, gaps in list(comparison.layers().items())[:1]:
        most = max((each.relative for each in gaps if each.relative is not None and math.isfinite(each.relative)), default=0.0)
        rows = [
            [module(gap.module), _side(gap.a), _side(gap.b), error(gap.relative), bar(most, ("casts", min(gap.relative or 0.0, most)))]
            for gap in gaps
        ]
        found.append(Table((name, comparison.a.name, comparison.b.name, ">difference", "by depth"), rows))
    return Section("depth", "By depth", "Difference by depth", found)


def _computed(comparison: CaptureComparison) -> Section:
    rows = [[module(name, "(the model)"), Cell(one), Cell(other), whole(number)] for name, one, other, number in comparison.computed()]
    told = (
        "The modules whose dtypes differ, with `*` for the numbers of layers: dtypes of inputs and outputs, and of the weights if they "
        "differ from these."
    )
    table = Table(("module", comparison.a.name, comparison.b.name, ">outputs"), rows, where=".computed() holds them")
    alike = Text("Every module has the same dtypes of inputs, weights and outputs in both programs.", is_soft=True)
    parts: list[Part] = [Text(told, is_soft=True), table] if rows else [alike]
    return Section("computed", "Dtypes", "Modules with different dtypes", parts)


def _modules(comparison: CaptureComparison) -> Section:
    shown = comparison.gaps[:TABLE_ROWS]
    rows = [
        [module(gap.named), whole(at), Cell(gap.kind), _side(gap.a), _side(gap.b), error(gap.relative), Cell(gap.how or gap.why)]
        for at, gap in enumerate(shown, 1)
    ]
    kinds = ("with inner modules", "innermost")
    table = Table(
        ("module", ">order", "class", comparison.a.name, comparison.b.name, ">difference", "compared by"),
        rows,
        label="The difference of every module's output",
        note=left_out(shown, len(comparison.gaps), "first", "`to_dict()`"),
        filter="module, class, dtype",
        choice="Modules",
        choices=kinds,
        groups=[kinds[gap.is_leaf] for gap in shown],
    )
    return Section("modules", "All modules", "All modules", [table], is_long=True)


def _figure(comparison: CaptureComparison, low: Gap | None) -> Depth | None:
    """Return the gap of every module's output in the order of the calls, those without modules inside as points.

    None where nothing is apart.
    """
    known = [(at, gap) for at, gap in enumerate(comparison.gaps, 1) if gap.relative and gap.kind]
    lines = []
    for is_leaf, name, colour in ((True, "modules", "casts"), (False, "modules with inner modules", "other")):
        points = [(at, min(gap.relative or 0.0, 1.0)) for at, gap in known if gap.is_leaf is is_leaf]
        if points:
            lines.append(Line(name, colour, points, 2.6))
    if not lines or low is None:
        return None
    first = next((at, min(gap.relative or 0.0, 1.0), gap.named) for at, gap in known)
    dtype = max((low.a.output, low.b.output), key=lambda name: name != "float32")
    across = "modules, in the order in which they returned"
    return Depth(lines, low.rounding or None, f"one rounding to {dtype}", first, across)
