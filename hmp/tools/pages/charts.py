"""Charts as inline SVG, drawn by matplotlib: they need no script, print, and take their colours from the page's CSS."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..extras import needed

with needed("a report's page needs", "report", "matplotlib"):
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

from ...core.formatting import duration, typeset_duration

# matplotlib knows no CSS variables: each is drawn in a colour of its own, which is replaced in the SVG.
VARIABLES = {
    "--ink": "#010101", "--soft": "#010102", "--line": "#010103", "--bfloat16": "#010104", "--float32": "#010105",
    "--float16": "#010106", "--other": "#010107", "--casts": "#010108", "--paper": "#010109", "--float8_e4m3fn": "#01010a",
}  # fmt: skip
_DTYPES = {"bfloat16", "float16", "float32", "float8_e4m3fn"}
_WIDE, _NARROW = 11.0, 5.0  # inches: for a desktop, and for a telephone
_MOST_TITLES = 300  # a telephone has no pointer, and the page is to stay small
Titles = dict[str, list[str]]  # id of a group of marks → what each of them says when it is pointed at


@dataclass(frozen=True)
class OpBar:
    """One op of the charts: seconds and calls by compute dtype, and seconds in casts."""

    op: str
    seconds: dict[str, float]
    calls: dict[str, int]
    cast_seconds: float

    @property
    def total(self) -> float:
        """All its seconds."""
        return sum(self.seconds.values()) + self.cast_seconds


def variable(name: str) -> str:
    """The CSS variable with the colour of a dtype or of "casts"."""
    return f"--{name}" if name in _DTYPES or name == "casts" else "--other"


def time_and_calls(bars: Sequence[OpBar]) -> str:
    """Time by op, split by compute dtype and casts, beside calls by op and dtype."""
    described = "; ".join(f"{bar.op} {duration(bar.total)}, {sum(bar.calls.values())} calls" for bar in bars[:5])
    return at_both_widths(lambda width: _time_and_calls(bars, width), f"Time and calls by op and dtype. Most time: {described}", "time-")


def _time_and_calls(bars: Sequence[OpBar], width: float) -> tuple[Any, Titles]:
    titles: Titles = {}
    figure, left, right = _bar_panels([bar.op for bar in bars], ("time in the op and in its casts", "calls"), width)
    dtypes = sorted({dtype for bar in bars for dtype in (*bar.seconds, *bar.calls)}, key=lambda name: (name == "other", name))
    places = range(len(bars))
    for axes, values, total in (
        (left, [bar.seconds for bar in bars], [bar.total for bar in bars]),
        (right, [bar.calls for bar in bars], [float(sum(bar.calls.values())) for bar in bars]),
    ):
        start = [0.0] * len(bars)
        for dtype in dtypes:
            widths = [float(each.get(dtype, 0)) for each in values]
            drawn = axes.barh(places, widths, 0.66, left=start, color=VARIABLES[variable(dtype)])
            text = typeset_duration if axes is left else _calls
            said = "no floating dtype" if dtype == "other" else dtype
            _say(titles, drawn, [f"{bar.op} in {said}: {text(width)}" for bar, width in zip(bars, widths, strict=True)])
            start = [one + other for one, other in zip(start, widths, strict=True)]
        if axes is left:
            widths = [bar.cast_seconds for bar in bars]
            drawn = axes.barh(
                places, widths, 0.66, left=start, color=VARIABLES["--casts"], hatch="////", edgecolor=VARIABLES["--paper"], linewidth=0
            )
            _say(titles, drawn, [f"{bar.op}: {typeset_duration(bar.cast_seconds)} in its casts" for bar in bars])
        for place, value in zip(places, total, strict=True):
            _write(axes, value, place, (typeset_duration(value) if value else "no time") if axes is left else f"{value:,.0f}")
        axes.set_xlim(0, max([*total, 1e-9]) * 1.16)
    return figure, titles


def _bar_panels(names: Sequence[str], headings: tuple[str, str], width: float) -> tuple[Any, Any, Any]:
    """A figure with two panels for bars, one bar a name, from the top down."""
    figure, found = panels(width, 0.62 + 0.27 * len(names), [1.35, 1])
    shown = [short(name, 34 if width == _WIDE else 20) for name in names]
    for axes, heading in zip(found, headings, strict=True):
        beside_another = width == _WIDE and axes is not found[0]
        axes.set_yticks(*(([], []) if beside_another else (range(len(names)), shown)), parse_math=False)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.xaxis.set_visible(False)
        axes.set_title(heading, loc="left", fontsize=10, color=VARIABLES["--soft"])
    return figure, *found


def _write(axes: Any, end: float, place: int, text: str) -> None:
    """Writes what a bar amounts to behind its end."""
    axes.annotate(text, (end, place), (4, 0), textcoords="offset points", va="center", color=VARIABLES["--soft"], fontsize=8.5)


def _calls(number: float) -> str:
    return "1 call" if number == 1 else f"{number:,.0f} calls"


def _say(titles: Titles, drawn: Any, said: Sequence[str]) -> None:
    """Has each bar say its text when it is pointed at."""
    for patch, text in zip(drawn.patches, said, strict=True):
        patch.set_gid(f"bar-{len(titles)}")
        titles[patch.get_gid()] = [text]


@dataclass(frozen=True)
class Line:
    """A line of a chart: name, the CSS variable of its colour, (x, y) pairs, the size of its points, where 0 joins them by a line, and
    what each point says when it is pointed at."""

    name: str
    colour: str
    points: Sequence[tuple[int, float]]
    size: float
    titles: Sequence[str] = ()


def error_by_depth(
    lines: Sequence[Line],
    mark: float | None,
    marked: str,
    named: tuple[int, float, str] | None,
    prefix: str,
    across: str = "ops, in the order of their first calls",
) -> str:
    """Relative errors against the order of the calls, on a logarithmic scale.

    There is a dashed line at `mark`, which is called `marked`; `named` is a point with its name; `across` says what stands side by side.
    """
    label = "Relative error of every call, in their order"
    return at_both_widths(lambda width: _error_by_depth(lines, mark, marked, named, width, across), label, prefix)


def _error_by_depth(
    lines: Sequence[Line], mark: float | None, marked: str, named: tuple[int, float, str] | None, width: float, across: str
) -> tuple[Any, Titles]:
    titles: Titles = {}
    figure, (axes,) = panels(width, 3.3, [1])
    for line in lines:
        xs, ys = zip(*line.points, strict=True)
        style = {"linestyle": "", "marker": "o", "markersize": line.size} if line.size else {"linewidth": 1.7}
        (drawn,) = axes.plot(xs, ys, color=VARIABLES[line.colour], label=line.name, markeredgewidth=0, **style)
        if line.titles and (width == _WIDE or len(line.titles) <= _MOST_TITLES):
            drawn.set_gid(f"points-{len(titles)}")
            titles[drawn.get_gid()] = list(line.titles)
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
        longest = 60 if width == _WIDE else 26
        left = x < (min(at) + max(at)) / 2
        side, foot = ("left", (0, 0)) if left else ("right", (1, 0))
        leader = {"arrowstyle": "-", "color": VARIABLES["--soft"], "linewidth": 0.7, "relpos": foot, "shrinkA": 0}
        axes.annotate(
            short(name, longest), (x, y), (x, 0.97), textcoords=("data", "axes fraction"), ha=side, va="top", fontsize=8.5,
            color=VARIABLES["--ink"], parse_math=False, arrowprops=leader,
        )  # fmt: skip
    if mark is not None:
        axes.axhline(mark, color=VARIABLES["--soft"], linewidth=1, linestyle=(0, (4, 3)), label=marked)
    axes.set_xlabel(across, color=VARIABLES["--soft"], fontsize=9)
    axes.set_ylabel("relative error", color=VARIABLES["--soft"], fontsize=9)
    axes.grid(axis="y", color=VARIABLES["--line"], linewidth=0.7)
    axes.set_axisbelow(True)
    legend(figure, width)
    return figure, titles


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
    described = "; ".join(f"{bar.name} {bar.gain_text}, loss {bar.change_text}" for bar in bars[:5])
    label = f"Gain and change of the loss by unit. Most gain: {described}"
    return at_both_widths(lambda width: _gain_and_change(bars, gain, allowed, width), label, "units-")


def _gain_and_change(bars: Sequence[Bar], gain: str, allowed: float | None, width: float) -> tuple[Any, Titles]:
    titles: Titles = {}
    figure, left, right = _bar_panels([bar.name for bar in bars], (gain, "change of the loss, to first order"), width)
    places = range(len(bars))
    for axes, what, values, texts in (
        (left, "gain", [bar.gain for bar in bars], [bar.gain_text for bar in bars]),
        (right, "loss", [bar.change for bar in bars], [bar.change_text for bar in bars]),
    ):
        colours = [VARIABLES[variable(bar.dtype)] for bar in bars]
        drawn = axes.barh(places, values, 0.66, color=colours)
        _say(titles, drawn, [f"{bar.name}: {what} {text}" for bar, text in zip(bars, texts, strict=True)])
        for place, value, text in zip(places, values, texts, strict=True):
            _write(axes, max(value, 0), place, text)
        low, high = min([0.0, *values]), max([0.0, *values])
        span = high - low or 1.0
        axes.set_xlim(low - 0.02 * span, high + 0.22 * span)
        axes.axvline(0, color=VARIABLES["--line"], linewidth=0.8)
        axes.spines["left"].set_visible(False)
    if allowed is not None and right.get_xlim()[0] < allowed < right.get_xlim()[1]:
        right.axvline(allowed, color=VARIABLES["--soft"], linewidth=1, linestyle=(0, (4, 3)))
    return figure, titles


def legend(figure: Any, width: float) -> None:
    """Says above the chart what its marks mean."""
    made = figure.legend(frameon=False, fontsize=9, loc="outside upper right", ncols=4 if width == _WIDE else 2, labelspacing=0.8)
    for text in made.get_texts():
        text.set_color(VARIABLES["--ink"])
        text.set_parse_math(False)


def panels(width: float, height: float, widths: Sequence[float]) -> tuple[Any, list[Any]]:
    """A figure with as many panels as `widths`: beside each other where it is wide, else below each other."""
    count = len(widths)
    below = width == _NARROW and count > 1
    figure = Figure(figsize=(width, height * (count if below else 1)), layout="constrained")
    figure.patch.set_alpha(0)
    shape: dict[str, Any] = {"nrows": count} if below else {"ncols": count, "gridspec_kw": {"width_ratios": list(widths)}}
    found = list(figure.subplots(**shape, squeeze=False).flat)
    for axes in found:
        axes.patch.set_alpha(0)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "left" or (side == "bottom" and count == 1))
            spine.set_color(VARIABLES["--line"])
        axes.tick_params(length=0, which="both", labelcolor=VARIABLES["--ink"], labelsize=9.5)
    return figure, found


def short(name: str, most: int) -> str:
    """The name without its middle, where it is longer than `most`."""
    return name if len(name) <= most else name[: most // 2 - 1] + "…" + name[-(most // 2) :]


def at_both_widths(draw: Callable[[float], tuple[Any, Titles]], label: str, prefix: str) -> str:
    """What `draw` makes at a width, once for wide windows and once for narrow ones; the style sheet shows the one that fits."""
    wide, narrow = draw(_WIDE), draw(_NARROW)
    return _svg(*wide, label, prefix, "wide") + _svg(*narrow, label, f"{prefix}narrow-", "narrow")


def _svg(figure: Any, titles: Titles, label: str, prefix: str, kind: str) -> str:
    """The figure as an SVG element whose ids start with `prefix`, so that they are no other's on the page."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hmp", "hatch.linewidth": 1.1}):
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    for group, said in titles.items():
        text = _titled(text, group, said)
    text = re.sub(r'(?<= id=")|(?<=url\(#)|(?<=xlink:href="#)', prefix, text)
    for name, colour in VARIABLES.items():
        text = text.replace(colour, f"var({name})")
    width, height = figure.get_size_inches() * 72
    opening = f'<svg class="chart {kind}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}"'
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    text = re.sub(r"<svg[^>]*>", lambda _: f"{opening} {spaces}>", text, count=1)
    return re.sub(r"\s*\n\s*", "\n", text)


def _titled(text: str, group: str, said: Sequence[str]) -> str:
    """The SVG with a title in each mark of the group: what a browser shows when it is pointed at."""
    start = text.index(f'<g id="{group}">')
    left = iter(said)
    mark = "use" if group.startswith("points") else "path"
    titled = re.sub(
        rf"<({mark}) ([^>]*?)/>", lambda m: f"<{m[1]} {m[2]}><title>{escape(next(left))}</title></{m[1]}>", text[start:], count=len(said)
    )
    return text[:start] + titled
