"""A page of a result, as one HTML file.

Its curves are drawn by matplotlib, as images that are as wide as a phone, in colours that show on light and on dark paper.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
from typing import Any

from ..extras import needed

with needed("a report's page needs", "report"):
    import jinja2
    import markupsafe
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

from ..formatting import duration, size
from .page import Depth, Page, TradeOff, colour_class, place_text

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}


def html(page: Page) -> str:
    """Return the page; what its values hold is text, and is escaped."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    filters: dict[str, Any] = {
        "breakable": _breakable,
        "coded": _coded,
        "kept": _kept,
        "short": lambda dtype: _SHORT.get(dtype, dtype),
        "colour": colour_class,
        "count": lambda number: f"{number:,}",
        "dtypes": lambda text: text.split(", ") if text else [],
        "place": place_text,
        "size": size,
        "duration": duration,
        "drawn": drawn,
    }
    made.filters |= filters
    return made.get_template("page.html.j2").render(page=page)


def _breakable(text: str) -> Any:
    """Let a long name go on in the next line after a dot or an underscore, and between the words of a class's name."""
    return markupsafe.Markup(re.sub(r"(?<=[._])(?=\D)|(?<=[a-z])(?=[A-Z])", "<wbr>", str(markupsafe.escape(text))))


def _coded(text: str) -> Any:
    """Backquotes become code, and a number stays on the line of its unit."""
    return markupsafe.Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(markupsafe.escape(_kept(text)))))


def _kept(text: str) -> str:
    text = re.sub(r"(?<=\d) us\b", " µs", text)
    return re.sub(r"(?<=\d) (?=(?:%|[KMGT]?i?B|[mµ]?s|[KMB])\b|%)", "\u00a0", text)


# --- charts ---

_INK, _LINE = "#7d8794", "#8e98a466"
_STYLE = ":root{color-scheme:light dark}text{fill:light-dark(#59636e,#a0a9b4)!important}"  # the page's --soft
COLOURS = {
    "bfloat16": "#2c8fa3", "float16": "#9272bd", "float32": "#dca52e", "float8_e4m3fn": "#c25aa4", "other": "#8b96a1", "casts": "#d8485f",
}  # fmt: skip
_WIDTH, _TEXT = 4.8, 9.5  # inches and points: in a phone's width, which is about as many points as pixels, text can be read
_NAME = 24  # letters of a name in the legend
_MARKERS = "os^D"
_FRAMES = "osD^vphH"  # around the points that have names, what was chosen first; the legend says the names


def drawn(figure: Depth | TradeOff) -> str:
    """Return the base64 of the chart as an SVG image."""
    return _depth(figure) if isinstance(figure, Depth) else _trade_off(figure)


def _depth(figure: Depth) -> str:
    axes = _axes(figure.across, "relative error")
    for line, marker in zip(figure.lines, itertools.cycle(_MARKERS)):  # what looks alike in two colours has two forms
        style: dict[str, Any] = {"linestyle": "", "marker": marker, "markersize": max(line.size, 3)} if line.size else {"linewidth": 1.2}
        style["color"] = COLOURS.get(line.colour, COLOURS["other"])
        axes.plot(*zip(*line.points, strict=True), label=line.name, markeredgewidth=0, **style)
    axes.set_yscale("log")
    axes.margins(x=0.03)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if figure.named is not None:
        x, y, name = figure.named
        _frame(axes, x, y, "o", name)
    if figure.mark is not None:
        axes.axhline(figure.mark, color=_INK, linewidth=1, linestyle=(0, (4, 3)), label=figure.marked)
    return _image(axes)


def _trade_off(figure: TradeOff) -> str:
    """Return the chart: what fits is a dot and what does not is a cross, so that they differ without colours.

    What has a name is in a frame of its own, what was chosen in a thick one.
    """
    points, allowed = figure.points, figure.allowed
    axes = _axes(figure.cost, figure.worse)
    for fits, marker, colour, label in ((True, "o", "bfloat16", "within the tolerance"), (False, "x", "casts", "beyond it")):
        own = [point for point in points if point.fits is fits]
        if own:
            style = {"marker": marker, "markersize": 5, "markeredgewidth": 1.5, "color": COLOURS[colour], "label": label}
            axes.plot([p.cost for p in own], [p.worse for p in own], linestyle="", zorder=3, **style)
    for limit, label in zip(allowed, ("the tolerance", "_"), strict=False):  # matplotlib's legend leaves out "_"
        axes.axhline(limit, color=_INK, linewidth=1, linestyle=(0, (4, 3)), label=label)
    # linear within the tolerance and logarithmic beyond it
    axes.set_yscale("symlog", linthresh=max(*allowed, 1e-4) if allowed else 0.01, linscale=1.5, subs=[2, 5])
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:+.3g} %" if value else "0")
    axes.margins(x=0.07, y=0.12)
    named = sorted((point for point in points if point.name or point.is_chosen), key=lambda point: (not point.is_chosen, point.cost))
    for point, frame in zip(named, itertools.cycle(_FRAMES)):  # names next to their points would lie on each other
        name = ": ".join(filter(None, ("chosen" if point.is_chosen else "", point.name)))
        _frame(axes, point.cost, point.worse, frame, name, 1.5 if point.is_chosen else 0.8)
    return _image(axes)


def _axes(across: str, up: str) -> Any:
    axes = Drawing(layout="constrained").subplots()
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_LINE)
    axes.tick_params(length=0, which="both", labelsize=_TEXT)
    axes.set_xlabel(across, fontsize=_TEXT)
    axes.set_ylabel(up, fontsize=_TEXT)
    axes.grid(axis="y", color=_LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    return axes


def _frame(axes: Any, x: float, y: float, marker: str, name: str, width: float = 0.8) -> None:
    """Draw a frame around a point, which has its name in the legend."""
    name = name if len(name) <= _NAME else name[: _NAME // 2 - 1] + "…" + name[-(_NAME // 2) :]
    axes.plot([x], [y], linestyle="", marker=marker, markersize=9, fillstyle="none", color=_INK, markeredgewidth=width, label=name)


def _image(axes: Any) -> str:
    """Return the drawing as an image, with a legend above it."""
    drawing, named = axes.figure, len(axes.get_legend_handles_labels()[0])
    drawing.set_size_inches(_WIDTH, 2.6 + 0.17 * math.ceil(named / 2))
    drawing.patch.set_alpha(0)
    legend = drawing.legend(frameon=False, fontsize=_TEXT, loc="outside upper left", ncols=2)
    for text in legend.get_texts():
        text.set_parse_math(False)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hmp"}):
        canvas: Any = FigureCanvasSVG(drawing)
        canvas.print_svg(file, metadata={"Date": None})
    svg = file.getvalue().decode().replace('<style type="text/css">', f'<style type="text/css">{_STYLE}', 1)
    return base64.b64encode(svg.encode()).decode()
