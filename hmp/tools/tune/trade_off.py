"""The trade-off of a search as a chart: how much worse each trial is against what it costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..pages.charts import VARIABLES, Titles, at_both_widths, legend, panels, short

_FRAMES = "osD^vphH"  # around the points that have names, what was chosen first; the legend says the names


@dataclass(frozen=True)
class Point:
    """A trial in the trade-off: its cost as a ratio to float32's, how much worse it is, its name in the legend, "" for none, and what it
    says when it is pointed at."""

    cost: float
    worse: float
    fits: bool
    name: str = ""
    is_chosen: bool = False
    title: str = ""


def trade_off(points: Sequence[Point], cost: str, worse: str, allowed: float | None) -> str:
    """How much worse each trial is against what it costs; a dashed line where the tolerance ends, and one along the best trade-offs.

    What fits is a dot and what does not is a cross, so that they are told apart without colours; what has a name is in a frame of its
    own, what was chosen in a ring.
    """
    described = "; ".join(f"{point.name} {point.cost:.2f}, {point.worse:+.2%}" for point in points if point.name)
    return at_both_widths(lambda width: _draw(points, cost, worse, allowed, width), f"{worse} against {cost}: {described}", "trade-")


def _draw(points: Sequence[Point], cost: str, worse: str, allowed: float | None, width: float) -> tuple[Any, Titles]:
    figure, (axes,) = panels(width, 4.2, [1])
    front = best_of(points)
    if len(front) > 1:
        axes.plot([p.cost for p in front], [p.worse for p in front], color=VARIABLES["--bfloat16"], linewidth=1.4, drawstyle="steps-post")
    titles = _marks(axes, points)
    if allowed is not None:
        axes.axhline(allowed, color=VARIABLES["--soft"], linewidth=1, linestyle=(0, (4, 3)), label=f"{allowed:.2%} allowed")
    _scales(axes, points, allowed)
    axes.set_xlabel(cost, color=VARIABLES["--soft"], fontsize=9)
    axes.set_ylabel(worse, color=VARIABLES["--soft"], fontsize=9)
    axes.grid(color=VARIABLES["--line"], linewidth=0.7)
    axes.set_axisbelow(True)
    _frames(axes, points)
    legend(figure, width)
    return figure, titles


def best_of(points: Sequence[Point]) -> list[Point]:
    """Those of what fits that nothing else is both cheaper and better than, the cheapest first."""
    line, left = [], [point for point in points if point.fits]
    while left:
        best = min(left, key=lambda each: (each.cost, each.worse))
        line.append(best)
        left = [each for each in left if each.worse < best.worse]
    return line


def _marks(axes: Any, points: Sequence[Point]) -> Titles:
    titles: Titles = {}
    for fits, marker, colour, label in ((True, "o", "--bfloat16", "within the tolerance"), (False, "X", "--casts", "beyond it")):
        own = [point for point in points if point.fits is fits]
        if own:
            titles[f"points-{marker}"] = [point.title for point in own]
            axes.plot(
                [p.cost for p in own], [p.worse for p in own], linestyle="", marker=marker, markersize=7.5, label=label,
                color=VARIABLES[colour], markeredgecolor=VARIABLES["--paper"], markeredgewidth=0.7, gid=f"points-{marker}", zorder=3,
            )  # fmt: skip
    return titles


def _frames(axes: Any, points: Sequence[Point]) -> None:
    """Puts what has a name into a frame that the legend explains: names beside their points would lie on each other."""
    named = sorted((point for point in points if point.name or point.is_chosen), key=lambda point: (not point.is_chosen, point.cost))
    for point, frame in zip(named, itertools.cycle(_FRAMES)):
        name = short(point.name, 28)
        axes.plot(
            [point.cost], [point.worse], linestyle="", marker=frame, markersize=13, fillstyle="none", color=VARIABLES["--ink"],
            markeredgewidth=1.6 if point.is_chosen else 0.9, label=": ".join(filter(None, ("chosen" if point.is_chosen else "", name))),
        )  # fmt: skip


def _scales(axes: Any, points: Sequence[Point], allowed: float | None) -> None:
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
