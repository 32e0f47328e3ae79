"""TUNING.md: the aims with their results, then a table for each question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ..harness.results import Row, at_most, table
from ..harness.stats import Estimate, paired_ratio
from .evidence import NUDGED, PAYS, START, tuned_name
from .search import OBJECTIVES

Found = dict[str, Any]
TIME, MEMORY = (tuned_name(objective) for objective in OBJECTIVES)


def lists(found: Found) -> str:
    """Return the name of the side with torch.autocast's lists under hmp."""
    return next(name for name in found["seconds a step"] if name.startswith("torch-"))


def outside(found: Found, side: str) -> bool:
    """Return True if a side's training, with other seeds and for longer than the search's, is out of tolerance."""
    return not found["changes"][side] <= found["bound"]


def time_ratio(found: Found, side: str) -> Estimate:
    """Return the side's step time over torch.autocast's."""
    samples = found["seconds a step"]
    return paired_ratio(samples[side], samples["autocast"])


def rows(tasks: Sequence[Found], cases: Sequence[Found]) -> list[Row]:
    """Return the rows of the aims."""
    made = []
    larger = [found for found in tasks if found.get("large")]
    tasks = _searched(tasks)
    if tasks:
        left = [f"{found['name']} {side}" for found in tasks for side in (TIME, MEMORY) if outside(found, side)]
        text = f"{len(left)} of {2 * len(tasks)} lists outside" + (f": {', '.join(left)}" if left else "")
        made.append(Row("tuned lists, other seeds and longer training: never outside the tolerance", "0 outside", text, not left))
        ratios = {found["name"]: time_ratio(found, TIME) for found in tasks}
        slower = [name for name, ratio in ratios.items() if ratio.above(1.0)]
        faster = [name for name, ratio in ratios.items() if ratio.value < 1 and ratio.value + ratio.noise < 1]
        worst = max(ratios, key=lambda name: ratios[name].value)
        known = all(ratio.known for ratio in ratios.values())
        text = f"{len(slower)} of {len(ratios)} slower by more than noise; worst {ratios[worst].text(2)} ({worst})"
        made.append(Row("tuned for time: never slower than torch.autocast", "0 slower", text, not slower if known else None))
        text = f"{len(faster)} of {len(ratios)} faster by more than noise"
        made.append(Row("tuned for time: faster than torch.autocast on most", f"> {len(ratios) // 2}", text, _most(faster, ratios, known)))
        above = [found["name"] for found in tasks if found["bytes"][MEMORY] > found["bytes"]["autocast"]]
        text = f"{len(above)} of {len(tasks)} keep more" + (f": {', '.join(above)}" if above else "")
        made.append(Row("tuned for memory: never more bytes for backward than torch.autocast", "0 more", text, not above))
    if larger:
        made.append(_larger(larger))
    for found in tasks:
        if found["broken"]:
            made.append(_recovered(found))
    for case in cases:
        for objective, of in case["objectives"].items():
            made.append(_distance(case, objective, of))
    return made


def _searched(tasks: Sequence[Found]) -> list[Found]:
    """Return the tasks that were searched: not those that were only timed, because low precision does not pay on this machine."""
    return [found for found in tasks if found["searches"]]


def _larger(tasks: Sequence[Found]) -> Row:
    """Return the row about the time of tuned lists, for tasks in which torch.autocast is faster than float32."""
    what, target = f"larger tasks, tuned for time: beside torch.autocast where that is {PAYS:g} times as fast as float32", 0.92
    shown = {found["name"]: time_ratio(found, TIME) for found in _searched(tasks)}
    if not shown:
        beside = [1 / time_ratio(found, "float32").value for found in tasks]
        said = f"cannot be shown here: torch.autocast takes {min(beside):.2f} to {max(beside):.2f} of float32's time"
        return Row(what, f"≤ {target}", said, None)
    worst = max(shown, key=lambda name: shown[name].value)
    return at_most(what, target, shown[worst], f"worst of {len(shown)}: {shown[worst].text(2)} ({worst})")


def _most(faster: list[str], ratios: dict[str, Estimate], known: bool) -> bool | None:
    return 2 * len(faster) > len(ratios) if known else None


def _recovered(found: Found) -> Row:
    """Return True if the start was broken and both tuned lists are not."""
    was_broken = not found["searched"]["change"] <= found["bound"]
    kept = sorted({op for of in found["searches"].values() for op in found["culprits"] if op in of["low"]})
    fine = was_broken and not kept and not outside(found, TIME) and not outside(found, MEMORY)
    text = f"start {percent(found['searched']['change'])}; tuned {percent(found['changes'][TIME])} and {percent(found['changes'][MEMORY])}"
    text += f"; still low: {', '.join(kept)}" if kept else f"; {', '.join(found['culprits'])} taken off"
    return Row(f"planted failure {found['name']}: recovered", "within tolerance", text, fine)


def _distance(case: Found, objective: str, of: Found) -> Row:
    """Return the distance of the choice from the best of all subsets, relative to the best's cost."""
    # bytes have no noise, times of one and the same subset no distance
    ratio = Estimate(of["chosen cost"] / of["best cost"], 0.0, 1)
    if objective == "time":
        ratio = Estimate(1.0, 0.0, 1) if of["chosen low"] == of["best"] else Estimate(**of["chosen over best"])
    row = at_most(
        f"search against all subsets, {case['name']}, {objective}: chosen over best",
        1.05,
        ratio,
        f"{ratio.text()}; {of['evaluations']} trials instead of {case['subsets']}",
    )
    return row if of["chosen fits"] else replace(row, result=f"{row.result}; outside the tolerance", met=False)


def percent(change: float | None) -> str:
    """Return a relative change for the worse as text."""
    return "NaN" if change is None or not math.isfinite(change) else f"{100 * change:+.1f} %"


def cell(found: Found, side: str) -> str:
    """Return a side's figure and how much worse than float32's it is, in bold if that is out of tolerance."""
    figure = found["figures"][side]
    text = f"{number(figure)} ({percent(found['changes'][side])})"
    return f"**{text} outside**" if outside(found, side) else text


def number(figure: float | None) -> str:
    """Return a number with four digits, or NaN."""
    return "NaN" if figure is None or not math.isfinite(figure) else f"{figure:.4f}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table."""
    return ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)]


def quality(tasks: Sequence[Found]) -> list[str]:
    """Return the table of final figures of training."""
    header = [
        "task",
        "measure",
        "allowed",
        "float32",
        "torch.autocast's lists",
        "habana",
        TIME,
        MEMORY,
        "float32 nudged",
        "seeds",
    ]
    lines = []
    for found in tasks:
        figures = [run["loss"] if run["metric"] is None else run["metric"] for run in found["trained"]["float32"]]
        spread = (max(figures) - min(figures)) / found["figures"]["float32"] if len(figures) > 1 else math.nan
        sides = (lists(found), "habana", TIME, MEMORY, NUDGED)
        allowed = f"{100 * found['bound']:.0f} %"
        cells = [found["name"], found["measure"], allowed, number(found["figures"]["float32"]), *(cell(found, side) for side in sides)]
        lines.append([*cells, "-" if math.isnan(spread) else f"{100 * spread:.1f} % apart"])
    return markdown(header, lines)


def times(tasks: Sequence[Found]) -> list[str]:
    """Return the table of step times against torch.autocast's."""
    header = ["task", "torch.autocast, ms", "float32", "its lists under hmp", "habana", TIME, "its low ops", "trials"]
    lines = []
    for found in tasks:
        of = found["searches"]["time"]
        ratios = [time_ratio(found, side).text(2) for side in ("float32", lists(found), "habana", TIME)]
        milliseconds = f"{1000 * median(found['seconds a step']['autocast']):.2f}"
        lines.append([found["name"], milliseconds, *ratios, ", ".join(of["low"]) or "none", str(of["evaluations"])])
    return markdown(header, lines)


def memory(tasks: Sequence[Found]) -> list[str]:
    """Return the table of bytes for backward against float32's."""
    header = [
        "task",
        "float32, KiB",
        "torch.autocast",
        "its lists under hmp",
        "habana",
        MEMORY,
        "its low ops",
        "trials",
    ]
    lines = []
    for found in tasks:
        of, kept = found["searches"]["memory"], found["bytes"]
        parts = [f"{kept[side] / kept['float32']:.3f}" for side in ("autocast", lists(found), "habana", MEMORY)]
        lines.append([found["name"], f"{kept['float32'] / 1024:,.0f}", *parts, ", ".join(of["low"]) or "none", str(of["evaluations"])])
    return markdown(header, lines)


def planted(tasks: Sequence[Found]) -> list[str]:
    """Return the table of planted failures and of the ops that the search moved."""
    header = ["failure", "start", "float32", "under the start", TIME, MEMORY, "taken off for time", "taken off for memory"]
    lines = []
    for found in tasks:
        if found["broken"]:
            off = [", ".join(f"**{op}**" if op in found["culprits"] else op for op in of["taken off"]) for of in found["searches"].values()]
            cells = [found["broken"], found["start"], number(found["figures"]["float32"])]
            lines.append([*cells, *(cell(found, side) for side in (START, TIME, MEMORY)), *off])
    return markdown(header, lines)


def exhaustive(cases: Sequence[Found]) -> list[str]:
    """Return the table of choices against the best of all subsets."""
    header = ["task", "objective", "subsets", "that fit", "trials", "chosen", "its cost", "the best subset", "its cost", "losses apart"]
    lines = []
    for case in cases:
        for objective, of in case["objectives"].items():
            chosen = f"{', '.join(of['low']) or 'none'} ({of['chosen']})"
            costs = [chosen, f"{of['chosen cost']:.3f}", ", ".join(of["best"]) or "none", f"{of['best cost']:.3f}"]
            counts = [str(case["subsets"]), str(case["fitting"]), str(of["evaluations"])]
            lines.append([case["name"], objective, *counts, *costs, f"{of['losses apart']:.0e}"])
    return markdown(header, lines)


_QUALITY = """\
Means over seeds {seeds}, none of them the search's, each trained {longer:g} times as long as the search's runs. In brackets by how much
that is worse than float32 from the same seed; a loss that is lower counts as worse too, since a loss in low precision loses digits of its
own. Of an accuracy under casts and that of the same weights in float32 the lower one counts. "float32 nudged" is float32 from weights
moved by a thousandth of themselves, less than their rounding to bfloat16; "seeds" is how far float32 from other seeds is apart.
A tolerance between the two judges precision, and neither luck nor the draw of the weights."""


_NO_INSTRUCTIONS = """\
This processor has no bfloat16 instructions (neither avx512_bf16 nor amx_bf16), and a product of matrices takes {ratio} times as long in
bfloat16 as in float32: lists with nothing in low precision are the right find for time here, and what a search is able to shows in the
bytes below. Another processor gives another table."""


def _processor(about: dict[str, Any]) -> list[str]:
    """Return a sentence about the processor, if the table depends on it."""
    if {"avx512_bf16", "amx_bf16"} & set(about.get("bf16 instructions", ())) or about.get("device") != "cpu":
        return []
    return [_NO_INSTRUCTIONS.format(ratio=about.get("bf16 matmul / float32 matmul")), ""]


def report(tasks: Sequence[Found], cases: Sequence[Found], about: dict[str, Any], command: str, seconds: float) -> str:
    """Return the page."""
    lines = ["# Tuned lists", "", f"`{command}`, {seconds:.0f} s. Written by the command; the samples are in `tuning.json`.", ""]
    lines += [f"- {name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in about.items()]
    lines += ["", table(rows(tasks, cases), markdown=True), ""]
    tasks = _searched(tasks)
    if tasks:
        first = tasks[0]
        said = _QUALITY.format(seeds=", ".join(map(str, first["seeds"])), longer=first["steps"] / first["steps of the search"])
        lines += ["## The tasks", "", *(f"- {found['name']}: {found['about']}; {found['steps']} steps" for found in tasks), ""]
        lines += ["## After training", "", said, "", *quality(tasks), ""]
        lines += ["## Time of a training step, as a ratio to torch.autocast's", "", *_processor(about), *times(tasks), ""]
        lines += ["## Bytes kept for backward, as a ratio to float32's", "", *memory(tasks), ""]
    if any(found["broken"] for found in tasks):
        lines += ["## Planted failures", "", *planted(tasks), ""]
    if cases:
        said = (
            "Every subset of the ops was trained, and those within the tolerance timed. Costs are ratios to float32. A choice may be a "
            "preset, which leaves ops unlisted; then it can cost less than every subset. The last column is how far the search's losses "
            "are from those of the same lists in runs of plain torch."
        )
        lines += ["## The search against every subset", "", said, "", *exhaustive(cases), ""]
    return "\n".join(lines).rstrip() + "\n"
