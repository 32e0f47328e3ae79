"""Curves drawn by matplotlib, as images of a page: in colours that show on light and on dark paper."""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..extras import needed
from .page import Depth, Point, TradeOff

with needed("a report's page needs", "report", "matplotlib"):
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

_INK, _LINE = "#7d8794", "#8e98a466"
COLOURS = {
    "bfloat16": "#2c8fa3", "float16": "#9272bd", "float32": "#dca52e", "float8_e4m3fn": "#c25aa4", "other": "#8b96a1", "casts": "#d8485f",
}  # fmt: skip
_FRAMES = "osD^vphH"  # around the points that have names, what was chosen first; the legend says the names


def colour_of(name: str) -> str:
    """Return the colour of a dtype or of "casts"."""
    return COLOURS.get(name, COLOURS["other"])


def drawn(figure: Depth | TradeOff) -> str:
    """Return the base64 of the chart as an SVG image."""
    return _depth(figure) if isinstance(figure, Depth) else _trade_off(figure)


def _depth(figure: Depth) -> str:
    lines, mark, named = figure.lines, figure.mark, figure.named
    drawing, axes = _axes(3.4, figure.across, "relative error")
    for line in lines:
        style: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": line.size} if line.size else {"linewidth": 1.7}
        axes.plot(*zip(*line.points, strict=True), color=colour_of(line.colour), label=line.name, markeredgewidth=0, **style)
    axes.set_yscale("log")
    axes.margins(x=0.03, y=0.2)  # room above for the name of a point
    axes.xaxis.get_major_locator().set_params(integer=True)
    at = [x for line in lines for x, _ in line.points]
    if named is not None:
        x, y, name = named
        side, foot = ("left", (0, 0)) if x < (min(at) + max(at)) / 2 else ("right", (1, 0))
        leader = {"arrowstyle": "-", "color": _INK, "linewidth": 0.7, "relpos": foot, "shrinkA": 0}
        axes.annotate(
            _short(name, 60), (x, y), (x, 0.97), textcoords=("data", "axes fraction"), ha=side, va="top", fontsize=8.5, color=_INK,
            parse_math=False, arrowprops=leader,
        )  # fmt: skip
    if mark is not None:
        axes.axhline(mark, color=_INK, linewidth=1, linestyle=(0, (4, 3)), label=figure.marked)
    return _image(drawing)


def _trade_off(figure: TradeOff) -> str:
    """Return the chart: what fits is a dot and what does not is a cross, so that they differ without colours.

    There is a line along the best trade-offs; what has a name is in a frame of its own, what was chosen in a thick one.
    """
    points, allowed = figure.points, figure.allowed
    drawing, axes = _axes(4.2, figure.cost, figure.worse)
    front = best_of(points)
    if len(front) > 1:
        axes.plot([p.cost for p in front], [p.worse for p in front], color=COLOURS["bfloat16"], linewidth=1.4, drawstyle="steps-post")
    for fits, marker, colour, label in ((True, "o", "bfloat16", "within the tolerance"), (False, "X", "casts", "beyond it")):
        own = [point for point in points if point.fits is fits]
        if own:
            axes.plot(
                [p.cost for p in own], [p.worse for p in own], linestyle="", marker=marker, markersize=7.5, label=label,
                color=COLOURS[colour], zorder=3,
            )  # fmt: skip
    if allowed is not None:
        axes.axhline(allowed, color=_INK, linewidth=1, linestyle=(0, (4, 3)), label=f"{allowed:.2%} allowed")
    # linear within the tolerance and logarithmic beyond it
    axes.set_yscale("symlog", linthresh=max(allowed or 0.01, 1e-4), linscale=1.5, subs=[2, 5])
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:+.3g} %" if value else "0")
    axes.margins(x=0.07, y=0.12)
    named = sorted((point for point in points if point.name or point.is_chosen), key=lambda point: (not point.is_chosen, point.cost))
    for point, frame in zip(named, itertools.cycle(_FRAMES)):  # names next to their points would lie on each other
        axes.plot(
            [point.cost], [point.worse], linestyle="", marker=frame, markersize=13, fillstyle="none", color=_INK,
            markeredgewidth=1.8 if point.is_chosen else 0.9,
            label=": ".join(filter(None, ("chosen" if point.is_chosen else "", _short(point.name, 28)))),
        )  # fmt: skip
    return _image(drawing)


def best_of(points: Sequence[Point]) -> list[Point]:
    """Return those of what fits that nothing else is both cheaper and better than, the cheapest first."""
    found, least = [], math.inf
    for point in sorted((point for point in points if point.fits), key=lambda each: (each.cost, each.worse)):
        if point.worse < least:
            found.append(point)
            least = point.worse
    return found


def _axes(height: float, across: str, up: str) -> tuple[Any, Any]:
    drawing = Drawing(figsize=(9.5, height), layout="constrained")
    drawing.patch.set_alpha(0)
    axes = drawing.subplots()
    axes.patch.set_alpha(0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_LINE)
    axes.tick_params(length=0, which="both", labelcolor=_INK, labelsize=9.5)
    axes.set_xlabel(across, color=_INK, fontsize=9)
    axes.set_ylabel(up, color=_INK, fontsize=9)
    axes.grid(axis="y", color=_LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    return drawing, axes


def _short(name: str, most: int) -> str:
    """Return the name without its middle, where it is longer than `most`."""
    return name if len(name) <= most else name[: most // 2 - 1] + "…" + name[-(most // 2) :]


def _image(drawing: Any) -> str:
    """Return the drawing as an image, with a legend above it."""
    legend = drawing.legend(frameon=False, fontsize=9, loc="outside upper right", ncols=4, labelspacing=0.8)
    for text in legend.get_texts():
        text.set_color(_INK)
        text.set_parse_math(False)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hmp"}):
        canvas: Any = FigureCanvasSVG(drawing)
        canvas.print_svg(file, metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()
