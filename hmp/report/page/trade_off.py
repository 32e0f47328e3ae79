"""The trade-off of a search as a chart: how much worse each trial is against what it costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .charts import VARIABLES, Titles, at_both_widths, legend, panels, short

# Where the name of a point may stand, in points from it, the nearest first: not beside it, where a line may go on.
_BESIDE = [(across * far, up * far) for far in (8, 14, 20, 28, 38, 50, 64) for up in (1, -1, 2, -2, 0.4, -0.4) for across in (1, -1)]
_Place = tuple[float, float]
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
    """Writes the names beside their points, with a line to the point where another is about as near."""
    figure.draw_without_rendering()
    at = {id(point): tuple(axes.transData.transform((point.cost, point.worse))) for point in points}
    unit = figure.dpi / 72
    inside = axes.get_window_extent()
    corners = [at[id(point)] for point in front]
    steps = [line for (x, y), (to, height) in itertools.pairwise(corners) for line in ((x, y, to, y), (to, height, to, y))]
    names = _Names((inside.x0, inside.y0, inside.x1, inside.y1), list(at.values()), steps, unit)
    for number, point in enumerate(sorted((each for each in points if each.name), key=lambda each: (not each.is_chosen, each.cost))):
        text = short(point.name, 28)
        right, up, leads = names.place(at[id(point)], 5.4 * len(text) * unit)
        leader = {"arrowstyle": "-", "color": VARIABLES["--soft"], "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0, "relpos": (right < 0, 0.5)}
        written = axes.annotate(
            text, (point.cost, point.worse), (right, up), textcoords="offset points", ha="left" if right > 0 else "right", va="center",
            fontsize=8.5, color=VARIABLES["--ink"], parse_math=False, arrowprops=leader if leads else None,
        )  # fmt: skip
        written.set_gid(f"name-{number}")
        if written.arrow_patch is not None:
            written.arrow_patch.set_gid(f"leader-{number}")


@dataclass
class _Names:
    """Where names stand: inside a box, on no other name, no mark and, if there is room, no line. All in the figure's own units."""

    inside: _Box
    marks: list[_Place]
    lines: list[_Box]
    unit: float
    taken: list[_Box] = field(default_factory=list)
    leaders: list[_Place] = field(default_factory=list)  # places along the lines from names to marks

    def place(self, mark: _Place, width: float) -> tuple[float, float, bool]:
        """Where the next name may stand, in points from its mark, and whether it needs a line to it."""
        others = [each for each in self.marks if math.dist(each, mark) > self.unit]
        found = []
        for at, (right, up) in enumerate(_BESIDE):
            foot = (mark[0] + right * self.unit, mark[1] + up * self.unit)
            start = foot[0] if right > 0 else foot[0] - width
            box = (start, foot[1] - 6 * self.unit, start + width, foot[1] + 6 * self.unit)
            needs = any(_away(box, each) < 1.6 * _away(box, mark) for each in others)
            found.append((self._cost(box, _along(mark, foot) if needs else [], others), at, box, needs))
        _, at, box, needs = min(found)
        right, up = _BESIDE[at]
        self.taken.append(box)
        if needs:
            self.leaders += _along(mark, (mark[0] + right * self.unit, mark[1] + up * self.unit))
        return right, up, needs

    def _cost(self, box: _Box, leader: Sequence[_Place], others: Sequence[_Place]) -> float:
        """How bad a place is."""
        outside = box[0] < self.inside[0] or box[1] < self.inside[1] or box[2] > self.inside[2] or box[3] > self.inside[3]
        on_names = sum(_meet(box, other) for other in self.taken) + sum(_away(other, each) == 0 for other in self.taken for each in leader)
        on_marks = sum(_away(box, each) < 5 * self.unit for each in others)
        on_marks += sum(math.dist(each, place) < 5 * self.unit for each in others for place in leader)
        on_lines = sum(_meet(box, line) for line in self.lines) + sum(_away(box, each) == 0 for each in self.leaders)
        return 2000 * outside + 1000 * (on_names + on_marks) + 100 * on_lines + 30 * bool(leader)


def _along(start: _Place, end: _Place) -> list[_Place]:
    return [(start[0] + (end[0] - start[0]) * part / 8, start[1] + (end[1] - start[1]) * part / 8) for part in range(1, 8)]


def _meet(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] <= other[3] and other[1] <= one[3]


def _away(box: _Box, where: _Place) -> float:
    """How far a point is from a box."""
    across, up = max(box[0] - where[0], where[0] - box[2], 0.0), max(box[1] - where[1], where[1] - box[3], 0.0)
    return float((across**2 + up**2) ** 0.5)
