"""The growth of hmp's overhead with a model: with its depth, and with its number of parameters.

The blocks are a transformer's, tiny, on one thread under no_grad; the clock is the thread's own processor time. In bfloat16
throughout there is nothing to cast, and what a side adds to plain torch, divided by the number of ATen ops that compute, is its
overhead per op. In float32 every listed op has casts: for it the table has the two sides' times per op.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import nn

from ..harness import verify
from ..harness.results import Found, Row
from ..harness.sides import autocast, plain, under_hmp
from ..harness.stats import Estimate, estimate, paired_difference
from ..harness.timing import OWN, one_thread
from ..workloads.models import Case
from ..workloads.networks import Block
from .interleaved import Lane, Samples, ratio, time_lanes

POLICY = "torch-cpu"
DEPTH_FOR_WIDTHS, WIDTH_FOR_DEPTHS = 4, 16


def case(depth: int, width: int, dtype: torch.dtype) -> Case:
    """Return `depth` blocks and a batch of one row of four tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(depth))).to(dtype)
    return Case("blocks", f"{depth}x{width}", model, {"x": torch.randn(1, 4, width).to(dtype)}, computes_loss=False)


def added_per_op(timed: Samples, side: str, ops: int) -> Estimate:
    """Return the nanoseconds that the side adds to plain torch for each op."""
    samples = timed["no_grad"]
    difference = paired_difference(samples[side], samples["plain"])
    return Estimate(1e9 * difference.value / ops, 1e9 * difference.noise / ops, difference.rounds)


def least_added_per_op(timed: Samples, side: str, ops: int) -> float:
    """Return the same of the rounds' minima, because noise only ever adds."""
    samples = timed["no_grad"]
    return 1e9 * (min(samples[side]) - min(samples["plain"])) / ops


def time_per_op(timed: Samples, side: str, ops: int) -> Estimate:
    """Return the nanoseconds that the side takes for each op."""
    figure = estimate(timed["no_grad"][side])
    return Estimate(1e9 * figure.value / ops, 1e9 * figure.noise / ops, figure.rounds)


def run(depths: list[int], widths: list[int], rounds: int, seconds: float) -> Found:
    """Return the rows about growth; `samples["points"]` contains the figure's points."""
    found = Found("depth")
    found.details = [
        f"policy {POLICY}, one thread, no_grad, medians of {rounds} rounds; ns per op",
        f"{'layers x width':>14} {'parameters':>11} {'ops':>6} {'plain':>8} {'+hmp':>15} {'(minima)':>8} {'+autocast':>15} {'(minima)':>8}"
        f" {'casting: hmp':>14} {'autocast':>9} {'ratio':>7}",
    ]
    points: list[dict[str, object]] = []
    nothing_to_cast: dict[tuple[int, int], Estimate] = {}
    with one_thread():
        for depth, width in dict.fromkeys([*((d, WIDTH_FOR_DEPTHS) for d in depths), *((DEPTH_FOR_WIDTHS, w) for w in widths)]):
            low, full = case(depth, width, torch.bfloat16), case(depth, width, torch.float32)
            with torch.no_grad():
                ops = verify.compute_count(plain(), low.output)
            sides = [plain(), autocast("cpu"), under_hmp(POLICY)]
            timed_low = time_lanes([Lane(side, low, ("no_grad",)) for side in sides], rounds, seconds, "cpu", OWN)
            timed_full = time_lanes([Lane(side, full, ("no_grad",)) for side in sides[1:]], rounds, seconds, "cpu", OWN)
            ours, theirs = (added_per_op(timed_low, side, ops) for side in ("hmp", "autocast"))
            least = [least_added_per_op(timed_low, side, ops) for side in ("hmp", "autocast")]
            casting = [time_per_op(timed_full, side, ops) for side in ("hmp", "autocast")]
            over_autocast = ratio(timed_full, "no_grad")
            nothing_to_cast[depth, width] = ours
            plain_ns = 1e9 * median(timed_low["no_grad"]["plain"]) / ops
            points.append(
                {
                    "depth": depth,
                    "width": width,
                    "parameters": low.parameters,
                    "ops": ops,
                    "hmp": [ours.value, ours.noise],
                    "autocast": [theirs.value, theirs.noise],
                    "casting hmp": [casting[0].value, casting[0].noise],
                    "casting autocast": [casting[1].value, casting[1].noise],
                    "seconds, nothing to cast": timed_low["no_grad"],
                    "seconds, casting": timed_full["no_grad"],
                }
            )
            found.details.append(
                f"{low.size:>14} {low.parameters:11,} {ops:6,} {plain_ns:8.0f}"
                f" {ours.text(0):>15} {least[0]:+8.0f} {theirs.text(0):>15} {least[1]:+8.0f}"
                f" {casting[0].value:14.0f} {casting[1].value:9.0f} {over_autocast.value:7.3f}"
            )
    found.samples["points"] = points
    by_depth = [(d, nothing_to_cast[d, WIDTH_FOR_DEPTHS]) for d in depths]
    by_width = [(case(DEPTH_FOR_WIDTHS, w, torch.float32).parameters, nothing_to_cast[DEPTH_FOR_WIDTHS, w]) for w in widths]
    found.rows = [_row("layers", by_depth), _row("parameters", by_width)]
    return found


def _row(unit: str, figures: list[tuple[int, Estimate]]) -> Row:
    """Flat where the last is at most a tenth above the first. Each op of a wide model takes its memory from the C library's heap, whose
    state moves a call by more than hmp does: the row then says that the figure is within its noise."""
    (least, first), (most, last) = figures[0], figures[-1]
    noise = (first.noise**2 + last.noise**2) ** 0.5
    result = f"{first.text(0)} ns at {least:,}, {last.text(0)} ns at {most:,}"
    what, above = f"added per op with nothing to cast, over {unit}", last.value - 1.1 * first.value
    if noise == float("inf"):
        return Row(what, "flat", result, None)
    return Row(what, "flat", result, above <= 0, within_noise=abs(above) < noise)
