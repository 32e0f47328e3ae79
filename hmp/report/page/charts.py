"""Charts as inline SVG, drawn by matplotlib: they need no script, print, and take their colours from the page's CSS."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import to_install

try:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(f"a report's page needs matplotlib: {to_install('report')}") from error

from ...formatting import duration, typeset_duration
from .model import OpBar

# matplotlib knows no CSS variables: each is drawn in a colour of its own, which is replaced in the SVG.
_VARIABLES = {
    "--ink": "#010101", "--soft": "#010102", "--line": "#010103", "--bfloat16": "#010104", "--float32": "#010105",
    "--float16": "#010106", "--other": "#010107", "--casts": "#010108", "--paper": "#010109",
}  # fmt: skip
_DTYPES = {"bfloat16", "float16", "float32"}
_WIDTH = 11.0
# Where the name of a point may stand, in points from it, the best place first: not beside it, where a line may go on.
_BESIDE = ((9, 12), (9, -12), (-9, 12), (-9, -12), (12, 0), (-12, 0), (9, 24), (9, -24), (-9, 24), (-9, -24), (9, 38), (-9, 38))


def variable(name: str) -> str:
    """The CSS variable with the colour of a dtype or of "casts"."""
    return f"--{name}" if name in _DTYPES or name == "casts" else "--other"


def time_and_calls(bars: Sequence[OpBar]) -> str:
    """Time by op, split by compute dtype and casts, beside calls by op and dtype."""
    figure, (left, right) = _panels(0.62 + 0.27 * len(bars), 2, [1.35, 1])
    dtypes = sorted({dtype for bar in bars for dtype in (*bar.seconds, *bar.calls)}, key=lambda name: (name == "other", name))
    places = range(len(bars))
    for axes, values, total in (
        (left, [bar.seconds for bar in bars], [bar.total for bar in bars]),
        (right, [bar.calls for bar in bars], [float(sum(bar.calls.values())) for bar in bars]),
    ):
        start = [0.0] * len(bars)
        for dtype in dtypes:
            widths = [float(each.get(dtype, 0)) for each in values]
            axes.barh(places, widths, 0.66, left=start, color=_VARIABLES[variable(dtype)])
            start = [one + other for one, other in zip(start, widths, strict=True)]
        if axes is left:
            widths = [bar.cast_seconds for bar in bars]
            axes.barh(
                places, widths, 0.66, left=start, color=_VARIABLES["--casts"], hatch="////", edgecolor=_VARIABLES["--paper"], linewidth=0
            )
        for place, value in zip(places, total, strict=True):
            label = (typeset_duration(value) if value else "no time") if axes is left else f"{value:,.0f}"
            axes.annotate(label, (value, place), (4, 0), textcoords="offset points", va="center", color=_VARIABLES["--soft"], fontsize=8.5)
        axes.set_xlim(0, max([*total, 1e-9]) * 1.16)
        axes.xaxis.set_visible(False)
        axes.set_ylim(len(bars) - 0.4, -0.6)
    left.set_yticks(places, [_short(bar.op) for bar in bars], parse_math=False)
    right.set_yticks([])
    left.set_title("time in the op and in its casts", loc="left", fontsize=10, color=_VARIABLES["--soft"])
    right.set_title("calls", loc="left", fontsize=10, color=_VARIABLES["--soft"])
    described = "; ".join(f"{bar.op} {duration(bar.total)}, {sum(bar.calls.values())} calls" for bar in bars[:5])
    return _svg(figure, f"Time and calls by op and dtype. Most time: {described}", "time-")


@dataclass(frozen=True)
class Line:
    """A line of a chart: name, the CSS variable of its colour, (x, y) pairs, and the size of its points; 0 joins them by a line."""

    name: str
    colour: str
    points: Sequence[tuple[int, float]]
    size: float


def error_by_depth(lines: Sequence[Line], mark: float | None, marked: str, named: tuple[int, float, str] | None, prefix: str) -> str:
    """Relative errors against the order of the calls, on a logarithmic scale.

    There is a dashed line at `mark`, which is called `marked`; `named` is a point with its name.
    """
    figure, (axes,) = _panels(3.3, 1, [1])
    for line in lines:
        xs, ys = zip(*line.points, strict=True)
        style = {"linestyle": "", "marker": "o", "markersize": line.size} if line.size else {"linewidth": 1.7}
        axes.plot(xs, ys, color=_VARIABLES[line.colour], label=line.name, markeredgewidth=0, **style)
    axes.set_yscale("log")
    low, high = (pick(y for line in lines for _, y in line.points) for pick in (min, max))
    low, high = min(low, mark or low), max(high, mark or high)
    axes.set_ylim(low / 2, high * 8)  # room above for the name of a point
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e+").replace("1e+0", "1"))
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.xaxis.get_major_locator().set_params(integer=True)
    at = [x for line in lines for x, _ in line.points]
    axes.set_xlim(min(at) - 1, max(at) + 1)
    if named is not None:
        x, y, name = named
        left = x < (min(at) + max(at)) / 2
        side, foot = ("left", (0, 0)) if left else ("right", (1, 0))
        leader = {"arrowstyle": "-", "color": _VARIABLES["--soft"], "linewidth": 0.7, "relpos": foot, "shrinkA": 0}
        axes.annotate(
            _short(name, 60), (x, y), (x, 0.97), textcoords=("data", "axes fraction"), ha=side, va="top", fontsize=8.5,
            color=_VARIABLES["--ink"], parse_math=False, arrowprops=leader,
        )  # fmt: skip
    if mark is not None:
        axes.axhline(mark, color=_VARIABLES["--soft"], linewidth=1, linestyle=(0, (4, 3)), label=marked)
    axes.set_xlabel("ops, in the order of their first calls", color=_VARIABLES["--soft"], fontsize=9)
    axes.set_ylabel("relative error", color=_VARIABLES["--soft"], fontsize=9)
    axes.grid(axis="y", color=_VARIABLES["--line"], linewidth=0.7)
    axes.set_axisbelow(True)
    _legend(figure)
    return _svg(figure, "Relative error of every call, in their order", prefix)


@dataclass(frozen=True)
class Point:
    """A trial in the trade-off: its cost as a ratio to float32's, how much worse it is, and the name to write beside it, "" for none."""

    cost: float
    worse: float
    fits: bool
    name: str = ""
    is_chosen: bool = False


def trade_off(points: Sequence[Point], cost: str, worse: str, allowed: float | None) -> str:
    """How much worse each trial is against what it costs; a dashed line where the tolerance ends, and one along the best trade-offs.

    What fits is a dot and what does not is a cross, so that they are told apart without colours; what was chosen is in a ring.
    """
    figure, (axes,) = _panels(4.2, 1, [1])
    line, left = [], [point for point in points if point.fits]
    while left:  # of what fits: nothing else is both cheaper and better
        best = min(left, key=lambda each: (each.cost, each.worse))
        line.append(best)
        left = [each for each in left if each.worse < best.worse]
    if len(line) > 1:
        axes.plot([p.cost for p in line], [p.worse for p in line], color=_VARIABLES["--bfloat16"], linewidth=1.4, drawstyle="steps-post")
    for fits, marker, colour, label in ((True, "o", "--bfloat16", "within the tolerance"), (False, "X", "--casts", "beyond it")):
        own = [point for point in points if point.fits is fits]
        if own:
            axes.plot(
                [p.cost for p in own], [p.worse for p in own], linestyle="", marker=marker, markersize=7.5, label=label,
                color=_VARIABLES[colour], markeredgecolor=_VARIABLES["--paper"], markeredgewidth=0.7,
            )  # fmt: skip
    for point in points:
        if point.is_chosen:
            axes.plot(
                [point.cost], [point.worse], linestyle="", marker="o", markersize=15, fillstyle="none", label="chosen",
                color=_VARIABLES["--ink"], markeredgewidth=1.6,
            )  # fmt: skip
    if allowed is not None:
        axes.axhline(allowed, color=_VARIABLES["--soft"], linewidth=1, linestyle=(0, (4, 3)), label=f"{allowed:.2%} allowed")
    axes.set_yscale("symlog", linthresh=max(allowed or 0.01, 1e-4), linscale=1.5)
    costs, heights = [point.cost for point in points], [point.worse for point in points] + ([] if allowed is None else [allowed])
    room = 0.07 * (max(costs) - min(costs)) or 0.05
    axes.set_xlim(min(costs) - room, max(costs) + room)
    edge = max(allowed or 0.01, 1e-4) / 2
    axes.set_ylim(min(heights) * (1.8 if min(heights) < 0 else 1) - edge / 2, max(heights) * 1.8 + edge)
    bottom, top = axes.get_ylim()
    steps = [factor * 10.0**power * 2 * edge for power in range(5) for factor in (1, 2, 5)]
    marks = [0.0, edge, -edge, *steps, *(-step for step in steps)]
    axes.set_yticks([mark for mark in marks if bottom < mark < top], minor=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:+.3g} %" if value else "0")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel(cost, color=_VARIABLES["--soft"], fontsize=9)
    axes.set_ylabel(worse, color=_VARIABLES["--soft"], fontsize=9)
    axes.grid(color=_VARIABLES["--line"], linewidth=0.7)
    axes.set_axisbelow(True)
    _legend(figure)
    _name(figure, axes, points)
    described = "; ".join(f"{point.name} {point.cost:.2f}, {point.worse:+.2%}" for point in points if point.name)
    return _svg(figure, f"{worse} against {cost}: {described}", "trade-")


def _name(figure: Any, axes: Any, points: Sequence[Point]) -> None:
    """Writes the names beside their points, where they lie on no other name and on few points."""
    figure.draw_without_rendering()
    at = {id(point): axes.transData.transform((point.cost, point.worse)) for point in points}
    unit = figure.dpi / 72
    inside = axes.get_window_extent()
    taken: list[tuple[float, float, float, float]] = []
    for point in sorted((each for each in points if each.name), key=lambda each: (not each.is_chosen, each.cost)):
        text = _short(point.name, 40)
        width, height = 5.4 * len(text) * unit, 11 * unit
        found: list[tuple[int, tuple[float, float], tuple[float, float, float, float]]] = []
        for x, y in _BESIDE:
            start, middle = at[id(point)] + (x * unit, y * unit)
            start = start if x > 0 else start - width
            box = (start, middle - height / 2, start + width, middle + height / 2)
            outside = box[0] < inside.x0 or box[2] > inside.x1 or box[1] < inside.y0 or box[3] > inside.y1
            lies_on = sum(box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in taken)
            covers = sum(box[0] < across < box[2] and box[1] < up < box[3] for across, up in at.values())
            found.append((100 * lies_on + 50 * outside + covers, (x, y), box))
        _, (dx, dy), box = min(found, key=lambda each: each[0])
        taken.append(box)
        leader = {"arrowstyle": "-", "color": _VARIABLES["--soft"], "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4} if abs(dy) > 20 else None
        axes.annotate(
            text, (point.cost, point.worse), (dx, dy), textcoords="offset points", ha="left" if dx > 0 else "right", va="center",
            fontsize=8.5, color=_VARIABLES["--ink"], parse_math=False, arrowprops=leader,
        )  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """A unit: its name, the dtype whose colour it has, what it gains, and the relative change of the loss, each with its text."""

    name: str
    dtype: str
    gain: float
    gain_text: str
    change: float
    change_text: str


def gain_and_change(bars: Sequence[Bar], gain: str, allowed: float | None) -> str:
    """What each unit gains in the low dtype, beside what it does to the loss."""
    figure, (left, right) = _panels(0.62 + 0.27 * len(bars), 2, [1.35, 1])
    places = range(len(bars))
    for axes, values, texts in (
        (left, [bar.gain for bar in bars], [bar.gain_text for bar in bars]),
        (right, [bar.change for bar in bars], [bar.change_text for bar in bars]),
    ):
        colours = [_VARIABLES[variable(bar.dtype)] for bar in bars]
        axes.barh(places, values, 0.66, color=colours)
        for place, value, text in zip(places, values, texts, strict=True):
            axes.annotate(
                text, (max(value, 0), place), (4, 0), textcoords="offset points", va="center", color=_VARIABLES["--soft"], fontsize=8.5
            )
        low, high = min([0.0, *values]), max([0.0, *values])
        span = high - low or 1.0
        axes.set_xlim(low - 0.02 * span, high + 0.22 * span)
        axes.axvline(0, color=_VARIABLES["--line"], linewidth=0.8)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_visible(False)
        axes.set_ylim(len(bars) - 0.4, -0.6)
    if allowed is not None and right.get_xlim()[0] < allowed < right.get_xlim()[1]:
        right.axvline(allowed, color=_VARIABLES["--soft"], linewidth=1, linestyle=(0, (4, 3)))
    left.set_yticks(places, [_short(bar.name) for bar in bars], parse_math=False)
    right.set_yticks([])
    left.set_title(gain, loc="left", fontsize=10, color=_VARIABLES["--soft"])
    right.set_title("change of the loss, to first order", loc="left", fontsize=10, color=_VARIABLES["--soft"])
    described = "; ".join(f"{bar.name} {bar.gain_text}, loss {bar.change_text}" for bar in bars[:5])
    return _svg(figure, f"Gain and change of the loss by unit. Most gain: {described}", "units-")


def _legend(figure: Any) -> None:
    legend = figure.legend(frameon=False, fontsize=9, loc="outside upper right", ncols=5)
    for text in legend.get_texts():
        text.set_color(_VARIABLES["--ink"])
        text.set_parse_math(False)


def _panels(height: float, count: int, widths: Sequence[float]) -> tuple[Any, list[Any]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.patch.set_alpha(0)
    panels = figure.subplots(1, count, squeeze=False, gridspec_kw={"width_ratios": list(widths)})[0]
    for axes in panels:
        axes.patch.set_alpha(0)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "left" or (side == "bottom" and count == 1))
            spine.set_color(_VARIABLES["--line"])
        axes.tick_params(length=0, which="both", labelcolor=_VARIABLES["--ink"], labelsize=9.5)
    return figure, list(panels)


def _short(name: str, most: int = 34) -> str:
    return name if len(name) <= most else name[: most // 2 - 1] + "…" + name[-(most // 2) :]


def _svg(figure: Any, label: str, prefix: str) -> str:
    """The figure as an SVG element whose ids start with `prefix`, so that they are no other's on the page."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hmp", "hatch.linewidth": 1.1}):
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r'(?<= id=")|(?<=url\(#)|(?<=xlink:href="#)', prefix, text)
    for name, colour in _VARIABLES.items():
        text = text.replace(colour, f"var({name})")
    width, height = figure.get_size_inches() * 72
    opening = f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{_attribute(label)}"'
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    text = re.sub(r"<svg[^>]*>", lambda _: f"{opening} {spaces}>", text, count=1)
    return re.sub(r"\s*\n\s*", "\n", text)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
