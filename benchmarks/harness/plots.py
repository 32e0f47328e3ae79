"""The figures: hmp over torch.autocast for every model, and overhead per op over depth and parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .results import Found
from .stats import paired_ratio

HINT = "no plots: matplotlib is missing (pip install -e '.[bench]')"
_COLOURS = {
    "training": "#1b6ca8", "no_grad": "#d1495b", "inference_mode": "#edae49", "no_grad, one": "#8f2d56",
    "inference_mode, one": "#c98a1b", "hmp": "#1b6ca8", "autocast": "#d1495b",
}  # fmt: skip


def draw(found: list[Found], folder: Path) -> list[Path]:
    """The figures' files in `folder`, for those parts that were run; none, and a hint, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print(HINT)
        return []
    matplotlib.use("Agg")
    samples = {part.part: part.samples for part in found}
    drawn = []
    if samples.get("steps"):
        drawn.append(_steps(samples["steps"], folder / "steps.png"))
    if samples.get("depth", {}).get("points"):
        drawn.append(_depth(samples["depth"]["points"], folder / "depth.png"))
    return drawn


def _steps(samples: dict[str, Any], path: Path) -> Path:
    import matplotlib.pyplot as plt

    tasks = list(next(iter(samples.values()))["seconds a step"])
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.22 * len(samples) * len(tasks)), layout="constrained")
    height = 0.8 / len(tasks)
    for at, task in enumerate(tasks):
        ratios = [paired_ratio(of["seconds a step"][task]["hmp"], of["seconds a step"][task]["autocast"]) for of in samples.values()]
        places = [row + at * height for row in range(len(samples))]
        noise = [ratio.noise if ratio.noise < float("inf") else 0 for ratio in ratios]
        axes.barh(places, [ratio.value for ratio in ratios], height * 0.9, xerr=noise, label=task, color=_COLOURS[task], ecolor="#555555")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(samples))], list(samples))
    axes.invert_yaxis()
    axes.set_xlabel("time of a step, hmp / torch.autocast (below 1: hmp is faster)")
    figure.legend(loc="outside upper center", ncols=len(tasks), frameon=False)
    return _save(figure, path)


def _depth(points: list[dict[str, Any]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    narrow = [p for p in points if p["width"] == min(q["width"] for q in points)]
    widths = [p for p in points if p["depth"] == min(points, key=lambda q: -q["width"])["depth"]]
    for axes, chosen, x, keys, title in (
        (panels[0], narrow, "depth", ("hmp", "autocast"), "added per op, nothing to cast"),
        (panels[1], widths, "parameters", ("hmp", "autocast"), "added per op, nothing to cast"),
        (panels[2], narrow, "depth", ("casting hmp", "casting autocast"), "time per op, everything cast"),
    ):
        chosen = sorted(chosen, key=lambda p: p[x])
        for key in keys:
            side = key.removeprefix("casting ")
            noise = [p[key][1] if p[key][1] < float("inf") else 0 for p in chosen]
            axes.errorbar(
                [p[x] for p in chosen], [p[key][0] for p in chosen], noise, marker="o", capsize=3, color=_COLOURS[side], label=side
            )
        axes.set_xscale("log", base=2 if x == "depth" else 10)
        if x == "depth":
            axes.set_xticks([p[x] for p in chosen], [str(p[x]) for p in chosen])
        axes.set_xlabel("layers" if x == "depth" else "parameters")
        axes.set_ylabel("ns per op")
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.legend(frameon=False)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
