"""Packed activations against torch.autocast and gradient checkpointing: bytes at the end of forward, time of a step.

Bytes are counted without hmp's help, each memory once and without the model. Time is the thread's processor time of forward and backward,
on one thread; weights are written between steps.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import hmp

from ..harness.alive import bytes_alive
from ..harness.results import Found, Row, at_most
from ..harness.sides import Side, autocast, rotated
from ..harness.stats import geometric_mean, mean_ratio, paired_ratio
from ..harness.timing import no_garbage_collection, one_thread
from ..workloads import at_width
from ..workloads.models import Case

BYTES_TARGET, TIME_TARGET = 0.55, 1.15
CURVES = ("bert", "gpt2")  # whose blocks are put under checkpoint, one after another
_WIDE = 4  # rows of a batch at the largest width, twice as many below
_STEPS = 3  # of a round, of which the least disturbed one counts


@dataclass(frozen=True)
class Way:
    """A side, and the number of the model's blocks under gradient checkpointing."""

    side: Side
    blocks: int = 0

    @property
    def name(self) -> str:
        """Return the name for the report."""
        return self.side.name + (f", {self.blocks} checkpointed" if self.blocks else "")


def packed() -> Side:
    """Return hmp with the preset that packs, entered by every step."""
    return Side("saved8", region=lambda: hmp.casts("saved8"))


def checkpointed(case: Case, blocks: int) -> None:
    """Set gradient checkpointing for the first blocks of a model of transformers, and for no others."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [module for module in case.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for at, block in enumerate(found):
        vars(block).pop("forward", None)
        if at < blocks:
            vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)


def measured(case: Case, ways: list[Way], rounds: int) -> dict[str, tuple[int, list[float]]]:
    """Return bytes alive at the end of forward and, for each round, seconds of a step, by the way's name."""
    own = [*case.model.parameters(), *case.model.buffers(), *case.batch.values()]

    def written() -> None:
        """Write the weights, as an optimizer's step does."""
        with torch.no_grad():
            for parameter in case.model.parameters():
                parameter.add_(0)

    def step(way: Way) -> float:
        written()
        start = time.thread_time()
        way.side.run(case.loss).backward()
        case.model.zero_grad(set_to_none=True)
        return time.thread_time() - start

    kept, seconds = {}, {way.name: [] for way in ways}
    for way in ways:
        checkpointed(case, way.blocks)
        step(way)
        step(way)
        written()
        kept[way.name] = bytes_alive(lambda way=way: way.side.run(case.loss), own)
    with no_garbage_collection():
        for number in range(rounds):
            for way in rotated(ways, number):
                checkpointed(case, way.blocks)
                seconds[way.name].append(min(step(way) for _ in range(_STEPS)))
    checkpointed(case, 0)
    return {name: (kept[name], seconds[name]) for name in kept}


def run(widths: list[int], rounds: int) -> Found:
    """Return the rows about bytes and time, by width, and the curves of bytes over time."""
    found = Found("saved")
    of = f"saved8 / torch.autocast, medians of {rounds} rounds, of the minima"
    found.details = [f"{'model':12} {'torch.autocast':>20} {'bytes':>7} {'time':>16} {'(minima)':>9}   {of}"]
    if importlib.util.find_spec("transformers") is None:
        found.details = ["not measured: the models need transformers (pip install -e '.[bench]')"]
        return found
    with one_thread():
        for width in widths:
            _at(found, width, 2 * _WIDE if width < max(widths) else _WIDE, rounds)
        found.samples["curves"] = {name: _curve(found, at_width.build(name, max(widths), _WIDE), rounds) for name in CURVES}
    return found


def _at(found: Found, width: int, rows: int, rounds: int) -> None:
    theirs, ours = Way(autocast("cpu")), Way(packed())
    ratios: dict[str, Any] = {}
    least: dict[str, float] = {}
    for name in at_width.NAMES:
        of = measured(at_width.build(name, width, rows), [theirs, ours], rounds)
        (kept, seconds), (left, packing) = of[theirs.name], of[ours.name]
        ratios[name] = left / kept, paired_ratio(packing, seconds)
        found.samples[f"{name} {width}"] = of
        took = f"{kept / 2**20:8.1f} MiB {1000 * median(seconds):5.0f} ms"
        least[name] = min(packing) / min(seconds)
        beside = f"{ratios[name][1].text(2):>16} {least[name]:9.2f}"
        found.details.append(f"{name} {width:<{11 - len(name)}} {took:>20} {left / kept:7.2f} {beside}")
    what = f"saved8 / torch.autocast, width {width}: geometric mean of {len(ratios)}"
    kept_of = {name: ratio for name, (ratio, _) in ratios.items()}
    most, mean = max(kept_of, key=lambda name: kept_of[name]), geometric_mean(list(kept_of.values()))
    found.rows.append(
        Row(f"bytes kept for backward, {what}", f"≤ {BYTES_TARGET}", f"{mean:.2f}, most {kept_of[most]:.2f} ({most})", mean <= BYTES_TARGET)
    )
    times = {name: time for name, (_, time) in ratios.items()}
    most, mean_time = max(times, key=lambda name: times[name].value), mean_ratio(list(times.values()))
    said = f"{mean_time.text(2)} (minima {geometric_mean(list(least.values())):.2f}), most {times[most].text(2)} ({most})"
    found.rows.append(at_most(f"training step, {what}", TIME_TARGET, mean_time, said))


def _curve(found: Found, case: Case, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return bytes and the least time over torch.autocast's by side, with 0, 1, 2, … blocks under gradient checkpointing."""
    sides: list[Callable[[], Side]] = [lambda: autocast("cpu"), packed]
    ways = [Way(side(), blocks) for side in sides for blocks in range(5)]
    of = measured(case, ways, rounds)
    base, seconds = of[ways[0].name]
    curves: dict[str, list[tuple[float, float]]] = {}
    for way in ways:
        kept, took = of[way.name]
        least = min(took) / min(seconds)
        curves.setdefault(way.side.name, []).append((kept / base, least))
        text = paired_ratio(took, seconds).text(2)
        found.details.append(f"{case.title}: {way.name:26} bytes {kept / base:5.2f}, time {text} (minima {least:.2f})")
    left, took = curves["saved8"][0]
    beside = _between(curves["autocast"], left)
    what = f"step of {case.title}: saved8's time / that of checkpoints that keep as many bytes"
    found.rows.append(Row(what, "≤ 1", f"{took:.2f} / {beside:.2f}", took <= beside))
    return curves


def _between(curve: list[tuple[float, float]], kept: float) -> float:
    """Return the time at which a curve of falling bytes has that many, on a line between two of its points."""
    for (more, quicker), (less, slower) in itertools.pairwise(curve):
        if less <= kept <= more:
            return quicker + (slower - quicker) * (more - kept) / (more - less)
    return curve[-1][1]
