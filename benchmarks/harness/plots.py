"""The figures: a training step in every precision, for every model, overhead per op over depth and parameters, and the error of the
gradients of weights that are used many times over the number of uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .results import Found
from .stats import paired_ratio

HINT = "no plots: matplotlib is missing (pip install -e '.[bench]')"
_COLOURS = {"float32": "#9a9a9a", "autocast": "#d1495b", "hmp": "#1b6ca8", "pure": "#edae49"}
_SIDES = {"float32": "float32", "autocast": "torch.autocast", "hmp": "hmp, same lists", "pure": "pure bfloat16"}


def draw(found: list[Found], folder: Path) -> list[Path]:
    """Draw the figures of the parts that were run into `folder` and return their files; without matplotlib print a hint."""
    try:
        import matplotlib
    except ImportError:
        print(HINT)
        return []
    matplotlib.use("Agg")
    samples = {part.part: part.samples for part in found}
    drawn = []
    trained = {
        title: of["seconds a step"]["training"] for title, of in samples.get("steps", {}).items() if "training" in of["seconds a step"]
    }
    if trained:
        drawn.append(_steps(trained, folder / "steps.png"))
    if samples.get("depth", {}).get("points"):
        drawn.append(_depth(samples["depth"]["points"], folder / "depth.png"))
    if over := samples.get("reused", {}).get("errors over steps"):
        drawn.append(_errors(over, folder / "reused.png"))
    if curves := samples.get("saved", {}).get("curves"):
        drawn.append(_kept(curves, folder / "saved.png"))
    return drawn


def _kept(curves: dict[str, dict[str, list[tuple[float, float]]]], path: Path) -> Path:
    """Draw a panel for each model: time of a step over bytes saved for backward, with 0, 1, 2, … blocks under gradient checkpointing."""
    import matplotlib.pyplot as plt

    looks = {"autocast": ("torch.autocast", _COLOURS["autocast"], "o-"), "saved8": ("saved8", _COLOURS["hmp"], "s-")}
    figure, panels = plt.subplots(1, len(curves), figsize=(9, 3.8), layout="constrained", sharey=True, squeeze=False)
    for axes, (model, sides) in zip(panels[0], curves.items(), strict=True):
        for side, points in sides.items():
            label, colour, style = looks[side]
            axes.plot(*zip(*points, strict=True), style, label=label, color=colour)
            for blocks in (1, len(points) - 1):
                axes.annotate(str(blocks), points[blocks], (4, 4), textcoords="offset points", fontsize=8, color=colour)
        axes.set(xlabel="bytes kept for backward, torch.autocast = 1", title=model, xlim=(0, 1.05))
    panels[0][0].set_ylabel("time of a step, torch.autocast = 1")
    panels[0][-1].legend(frameon=False, fontsize=9, title="numbers: blocks under checkpoint", title_fontsize=8)
    return _save(figure, path)


def _steps(trained: dict[str, dict[str, list[float]]], path: Path) -> Path:
    """Draw a panel for each size, with a group of bars for every model, relative to torch.autocast."""
    import matplotlib.pyplot as plt

    sizes = list(dict.fromkeys(title.split()[1] for title in trained))
    figure, panels = plt.subplots(len(sizes), 1, figsize=(9, 0.8 + 2.3 * len(sizes)), layout="constrained", squeeze=False)
    width = 0.8 / len(_SIDES)
    for axes, size in zip(panels[:, 0], sizes, strict=True):
        models = [title for title in trained if title.split()[1] == size]
        for at, (side, label) in enumerate(_SIDES.items()):
            ratios = [paired_ratio(trained[title][side], trained[title]["autocast"]) for title in models]
            places = [group + (at + 0.5) * width - 0.4 for group in range(len(models))]
            noise = [ratio.noise if ratio.known else 0 for ratio in ratios]
            axes.bar(
                places,
                [ratio.value for ratio in ratios],
                width * 0.92,
                yerr=noise,
                label=label,
                color=_COLOURS[side],
                error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
            )
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(models)), [title.split()[0] for title in models])
        axes.set_title(size, fontsize=10, loc="left")
        # a bar's noise may be wider than all bars
        axes.set_ylim(
            0, 1.15 * max(paired_ratio(trained[title][side], trained[title]["autocast"]).value for title in models for side in _SIDES)
        )
    figure.supylabel("training step, over torch.autocast", fontsize=10)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(_SIDES), frameon=False, fontsize=9)
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


def _errors(over: dict[str, dict[str, dict[str, float]]], path: Path) -> Path:
    """Draw a panel for each recurrent net: the distance of its weights' gradients from float64's, over the number of steps."""
    import matplotlib.pyplot as plt

    looks = {
        "autocast": ("torch.autocast", _COLOURS["autocast"], "o-"),
        "each": ("torch.autocast(cache_enabled=False)", _COLOURS["float32"], "s-"),
        "hmp": ("hmp", _COLOURS["hmp"], "x--"),
    }
    figure, panels = plt.subplots(1, len(over), figsize=(9, 3.6), layout="constrained", sharey=True, squeeze=False)
    for axes, (net, by_steps) in zip(panels[0], over.items(), strict=True):
        steps = [int(count) for count in by_steps]
        for side, (label, colour, style) in looks.items():
            axes.plot(steps, [100 * errors[side] for errors in by_steps.values()], style, label=label, color=colour)
        axes.set(xscale="log", yscale="log", xlabel="steps", title=f"{net}, 32 to 64")
        axes.set_xticks(steps, [str(count) for count in steps])
        axes.minorticks_off()
    panels[0][0].set_ylabel("error of the gradients, %")
    panels[0][-1].legend(frameon=False, fontsize=9)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
