"""The trade-off of a search as a chart: how much worse each trial is against what it costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .charts import VARIABLES, Titles, at_both_widths, legend, panels, short

# Where the name of a point may stand, in points from it, the nearest first: not beside it, where a line may go on.
_BESIDE = [(across * far, up * far) for far in (8, 14, 20, 28, 38, 50, 64) for up in (1, -1, 2, -2, 0.4, -0.4) for across in (1, -1)]
_Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Point:
    """A trial in the trade-off: its cost as a ratio to float32's, how much worse it is, the name to write beside it, "" for none, and
    what it says when it is pointed at."""

    cost: float
    worse: float
    fits: bool
    name: str = ""
    is_chosen: bool = False
    title: str = ""


def trade_off(points: Sequence[Point], cost: str, worse: str, allowed: float | None) -> str:
    """How much worse each trial is against what it costs; a dashed line where the tolerance ends, and one along the best trade-offs.

    What fits is a dot and what does not is a cross, so that they are told apart without colours; what was chosen is in a ring.
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
    legend(figure, width)
    _name(figure, axes, points, front)
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
    for point in points:
        if point.is_chosen:
            axes.plot(
                [point.cost], [point.worse], linestyle="", marker="o", markersize=15, fillstyle="none", label="chosen",
                color=VARIABLES["--ink"], markeredgewidth=1.6,
            )  # fmt: skip
    return titles


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


def _name(figure: Any, axes: Any, points: Sequence[Point], front: Sequence[Point]) -> None:
    """Writes the names beside their points: on no other name, point or line; with a line to the point where another is about as near."""
    figure.draw_without_rendering()
    at = {id(point): tuple(axes.transData.transform((point.cost, point.worse))) for point in points}
    unit = figure.dpi / 72
    inside = axes.get_window_extent()
    steps = [at[id(point)] for point in front]
    lines = [line for (x, y), (to, height) in itertools.pairwise(steps) for line in ((x, y, to, y), (to, height, to, y))]
    taken: list[_Box] = []
    for number, point in enumerate(sorted((each for each in points if each.name), key=lambda each: (not each.is_chosen, each.cost))):
        x, y = at[id(point)]
        text = short(point.name, 28)
        width, height = 5.4 * len(text) * unit, 12 * unit
        others = [where for where in at.values() if abs(where[0] - x) + abs(where[1] - y) > unit]
        found: list[tuple[float, int, _Box]] = []
        for place, (right, up) in enumerate(_BESIDE):
            start, middle = x + right * unit, y + up * unit
            start = start if right > 0 else start - width
            box = (start, middle - height / 2, start + width, middle + height / 2)
            outside = box[0] < inside.x0 or box[2] > inside.x1 or box[1] < inside.y0 or box[3] > inside.y1
            on_names = sum(_meet(box, other) for other in taken)
            on_points = sum(_away(box, where) < 5 * unit for where in others)
            on_lines = sum(_meet(box, line) for line in lines)
            found.append(
                (1000 * (on_names + on_points) + 2000 * outside + 100 * on_lines + 30 * _is_nearer(box, (x, y), others), place, box)
            )
        _, place, box = min(found)
        taken.append(box)
        right, up = _BESIDE[place]
        leader = {"arrowstyle": "-", "color": VARIABLES["--soft"], "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4, "relpos": (right < 0, 0.5)}
        written = axes.annotate(
            text, (point.cost, point.worse), (right, up), textcoords="offset points", ha="left" if right > 0 else "right", va="center",
            fontsize=8.5, color=VARIABLES["--ink"], parse_math=False,
            arrowprops=leader if abs(up) > 20 or _is_nearer(box, (x, y), others) else None,
        )  # fmt: skip
        written.set_gid(f"name-{number}")
        if written.arrow_patch is not None:
            written.arrow_patch.set_gid(f"leader-{number}")


def _meet(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] <= other[3] and other[1] <= one[3]


def _away(box: _Box, where: Sequence[float]) -> float:
    """How far a point is from a box."""
    across, up = max(box[0] - where[0], where[0] - box[2], 0.0), max(box[1] - where[1], where[1] - box[3], 0.0)
    return float((across**2 + up**2) ** 0.5)


def _is_nearer(box: _Box, own: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
    """Whether another point is about as near to the name as its own."""
    return any(_away(box, other) < 1.6 * _away(box, own) for other in others)
