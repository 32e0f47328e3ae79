"""What hmp adds to a step of a model so narrow that Python's share of the time shows, and of a wider one: against torch.autocast."""

from __future__ import annotations

from functools import partial

from ..harness.results import Found, at_most
from ..harness.sides import autocast, policy_of, under_hmp
from ..harness.stats import Estimate, mean_ratio, paired_ratio
from ..harness.timing import one_thread
from ..workloads import small

NARROW: dict[str, small.Make] = {
    "attention d 32": partial(small.attention, 32, 4, (1, 8)),
    "attention d 64": partial(small.attention, 64, 4, (2, 16)),
    "mlp, 16 x 32": partial(small.mlp, 32, 16, 8),
    "convolutions, 8 channels": partial(small.convolutions, 8, 1, 12),
    "GRU 24": partial(small.recurrent, "GRU", 24),
}
WIDE: dict[str, small.Make] = {
    "attention d 128": partial(small.attention, 128),
    "attention d 384": partial(small.attention, 384),
    "mlp, 6 x 384": partial(small.mlp, 384),
}
# Those presets list dropout and views in bfloat16, so their cost is not that of torch.autocast's lists.
PRESETS, EVAL_BLOCK = ("habana", "bert", "gaudi"), 1.4
TRAINING_MEAN, TRAINING_WORST, INFERENCE_MEAN = 1.05, 1.09, 1.05
TRAINING_WIDE, INFERENCE_WIDE = 1.01, 1.01


def run(rounds: int, seconds: float, smallest: bool = False) -> Found:
    """Return the rows about narrow models, of one thread; times are the thread's own processor time."""
    found = Found("narrow")
    found.details = ["whole steps, hmp / torch.autocast, one thread", f"{'model':27} {'training':>15} {'inference':>15}"]
    ratios: dict[tuple[str, str], Estimate] = {}
    with one_thread():
        for title, make in {**NARROW, **({} if smallest else WIDE)}.items():
            task, among = small.Task(make), {"hmp": under_hmp(policy_of("cpu")), "autocast": autocast("cpu")}
            for name, step in (("training", task.train), ("inference", task.infer)):
                samples = small.seconds_of(step, among, rounds, 5 * seconds)  # hmp's first steps find out which weights are used again
                ratios[title, name] = paired_ratio(samples["hmp"], samples["autocast"])
                found.samples[f"{title}, {name}"] = samples
            found.details.append(f"{title:27} {ratios[title, 'training'].text():>15} {ratios[title, 'inference'].text():>15}")
        task, among = (
            small.Task(partial(small.by_hand, 64)),
            {each: under_hmp(each, each) for each in PRESETS} | {"autocast": autocast("cpu")},
        )
        samples = found.samples["block in evaluation"] = small.seconds_of(task.infer, among, rounds, 5 * seconds)
        of_presets = {each: paired_ratio(samples[each], samples["autocast"]) for each in PRESETS}
    training, inference = ([ratios[title, name] for title in NARROW] for name in ("training", "inference"))
    figures = [
        ("narrow models, training, hmp / torch.autocast: geometric mean", TRAINING_MEAN, mean_ratio(training)),
        ("narrow models, training, hmp / torch.autocast: worst", TRAINING_WORST, max(training, key=lambda each: each.value)),
        ("narrow models, inference, hmp / torch.autocast: geometric mean", INFERENCE_MEAN, mean_ratio(inference)),
    ]
    for title in () if smallest else WIDE:
        if title != "attention d 128":  # so narrow that Python shows
            figures.append((f"{title}, training, hmp / torch.autocast", TRAINING_WIDE, ratios[title, "training"]))
        figures.append((f"{title}, inference, hmp / torch.autocast", INFERENCE_WIDE, ratios[title, "inference"]))
    figures += [(f"block in evaluation, {each} / torch.autocast", EVAL_BLOCK, ratio) for each, ratio in of_presets.items()]
    found.rows = [at_most(what, limit, figure, figure.text()) for what, limit, figure in figures]
    return found
