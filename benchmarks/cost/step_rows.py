"""The rows and sentences about steps, from one interleaved measurement of all sides."""

from __future__ import annotations

from dataclasses import dataclass

from ..harness.opening import claim
from ..harness.results import Found, Row, at_most
from ..harness.stats import Estimate, mean_ratio
from .interleaved import Samples, ratio

TRAINING_TARGET, INFERENCE_TARGET, ONE_TARGET, NONE_ABOVE = 1.05, 1.05, 1.05, 1.10
PURE_TRAINING_TARGET, PURE_INFERENCE_TARGET = 1.10, 1.08
BATCH, ONE = ("no_grad", "inference_mode"), ("no_grad, one", "inference_mode, one")
Ratios = dict[str, Estimate]


@dataclass
class Measured:
    """One model at one size: seconds a step."""

    size: str
    samples: Samples


def ratios(measured: dict[str, Measured], task: str, of: str, over: str = "autocast", size: str | None = None) -> Ratios:
    """Return one side's time over another's, by model; of one size or of all."""
    return {title: ratio(m.samples, task, of, over) for title, m in measured.items() if size in (None, m.size)}


def worst_of(values: Ratios) -> str:
    """Return the model of the largest ratio."""
    return max(values, key=lambda title: values[title].value)


def mean_row(what: str, target: float, values: Ratios) -> Row:
    """Return the row of the ratios' geometric mean, with the worst of them."""
    if not values:
        return Row(what, f"≤ {target:.2f}", "nothing could be compared", None)
    mean, worst = mean_ratio(list(values.values())), worst_of(values)
    return at_most(f"{what}: geometric mean of {len(values)}", target, mean, f"{mean.text()}; worst {values[worst].text()} ({worst})")


def none_above_row(what: str, values: Ratios) -> Row:
    """Return a row that is met if no ratio is above by more than its noise."""
    what, target = f"{what}: none above", f"≤ {NONE_ABOVE:.2f}"
    if not values:
        return Row(what, target, "nothing could be compared", None)
    worst = worst_of(values)
    result = f"worst {values[worst].text()} ({worst})"
    if not all(value.known for value in values.values()):
        return Row(what, target, result, None)
    above = sum(value.above(NONE_ABOVE) for value in values.values())
    if above:
        result += f"; {above} of {len(values)} above by more than noise"
    return Row(what, target, result, not above, within_noise=not above and values[worst].value > NONE_ABOVE)


def training(found: Found, measured: dict[str, Measured]) -> None:
    """Return rows and sentences about training steps."""
    same, pure = (ratios(measured, "training", "hmp", over) for over in ("autocast", "pure"))
    title = "training step, same lists, hmp / torch.autocast"
    found.rows += [
        mean_row(title, TRAINING_TARGET, same),
        none_above_row(title, same),
        mean_row("training step, same lists, hmp / pure bfloat16", PURE_TRAINING_TARGET, pure),
    ]
    if not measured:
        return
    float32 = mean_ratio(list(ratios(measured, "training", "float32").values()))
    found.opening["same lists"] = f"{_spread(same)} Plain float32 takes {claim(float32, 'torch.autocast')}."
    found.opening["pure"] = f"a training step takes {claim(mean_ratio(list(pure.values())), 'the bfloat16 model')}."


def inference(found: Found, measured: dict[str, Measured], tasks: list[str], sizes: list[str]) -> None:
    """Return rows and sentences about inference: on a batch, on one example, and against a pure bfloat16 model."""
    batch, one = ([task for task in those if task in tasks] for those in (BATCH, ONE))
    for task in batch:
        title, values = f"inference, {task}, hmp / torch.autocast", ratios(measured, task, "hmp")
        found.rows += [mean_row(title, INFERENCE_TARGET, values), none_above_row(title, values)]
    for task in one:
        title = f"inference on one example, {task.partition(',')[0]}, hmp / torch.autocast"
        found.rows.append(mean_row(title, ONE_TARGET, ratios(measured, task, "hmp")))
    for task in batch:
        for size in sizes:
            title = f"inference, {task}, {size}, hmp / pure bfloat16"
            found.rows.append(mean_row(title, PURE_INFERENCE_TARGET, ratios(measured, task, "hmp", "pure", size)))
    if not measured or not batch:
        return
    each = [
        f"{'one example' if task in ONE else 'a batch'} under {task.partition(',')[0]} takes "
        f"{claim(mean_ratio(list(ratios(measured, task, 'hmp').values())), 'torch.autocast')}"
        for task in (*batch, *one)
    ]
    found.opening["inference"] = f"{'; '.join(each)}; geometric means of {len(measured)} models and sizes."
    pure = mean_ratio([value for task in batch for value in ratios(measured, task, "hmp", "pure").values()])
    before = f"{found.opening['pure'].removesuffix('.')}, " if "pure" in found.opening else ""
    found.opening["pure"] = f"{before}inference on a batch takes {claim(pure, 'the bfloat16 model')}."


def _spread(values: Ratios) -> str:
    """Return a sentence with a geometric mean and the models that it lies between."""
    worst, least = worst_of(values), min(values, key=lambda title: values[title].value)
    between = f"from {values[least].text(2)} ({least}) to {values[worst].text(2)} ({worst})"
    mean = claim(mean_ratio(list(values.values())), "torch.autocast")
    return f"it takes {mean}, geometric mean of {len(values)} models and sizes, {between}."
