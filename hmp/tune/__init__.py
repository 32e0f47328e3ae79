"""tune(): the cheapest op lists that keep a model within a tolerance of float32, measured and verified on the user's own task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from ..lists import Policy
    from .progress import Progress
    from .result import TuneResult
    from .tolerance import Tolerance


def tune(  # noqa: PLR0913
    model: torch.nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Any],
    tolerance: float | Mapping[str, float] | Tolerance = 0.01,
    metric: Callable[[Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    budget: float | str | None = None,
    start: str | Path | Policy = "autocast",
    per_module: bool = False,
    ops: Collection[str] | None = None,
    levels: Collection[str] = ("bf16", "fp32"),
    objective: Literal["time", "memory", "bytes"] = "time",
    steps: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = True,
    progress: bool | Progress | None = None,
) -> TuneResult:
    """The cheapest lists within `tolerance` of float32, as a TuneResult whose `policy` they are.

    `loss(model, batch)` gives a scalar tensor. With `optimizer(model)`, which gives an optimizer over the model's parameters, a policy
    is verified by training `steps` steps over the batches in turns (by default once over all of them, and 20 at least), and its loss is
    the mean over the last pass; without, the loss is the mean over the batches, with gradients where they are asked for.
    `metric(model)` gives a number, the larger the better (an accuracy), after training, and is called under the policy.
    Both start from the model's state and `seed`, every time.

    `tolerance` is the most by which the metric may be worse than float32's or, where there is no metric, the loss may differ from it,
    relative to it; or a mapping with bounds for "loss", "metric" and "gradient", the last being the least cosine between the gradient and
    float32's.
    `objective` is what is made small: the time of a step, or the bytes that it keeps for backward, by the lists of casts alone ("memory")
    or also by packing what ops keep ("bytes"): the saved list is one more level, with the recipe of the preset "saved8".

    `start` is the policy to begin with: it says what is done with ops that are not decided, and its low dtype is used. Decided are the
    ops that the model calls and that `start` or a preset has on its BF16 or FP32 list, or those of `ops` among them; with `per_module`
    each of them in each module by itself, written as scoped lines.

    With "fp8" among the `levels`, as much of the products' work as the tolerance allows then moves from the lists that were found to the
    FP8 list, by op or by module; work is floating-point operations, since most devices emulate FP8 and its time says nothing there. On one
    that computes in FP8 the list must also be faster, where time is the objective. `start` says the recipe (Policy.fp8_recipe).

    `budget` bounds the search: a number of seconds, or "10 min", "2 h", "30 evaluations". With `folder` the best lists so far are
    there at any time (after Ctrl-C too), with tune.json, which holds all that was measured; a second call with the same arguments
    goes on where it ended, unless `resume` is False. `progress` shows a bar on stderr, by default on a terminal.

    What is evaluated is the same for the same seed and the same measured times. Afterwards model, random state and torch are as before.
    Raises HmpError for wrong arguments, and where float32 itself gives no finite loss.
    """
    from .run import run  # here, so that `import hmp` does not pay for it

    return run(
        model,
        batches,
        loss=loss,
        tolerance=tolerance,
        metric=metric,
        optimizer=optimizer,
        budget=budget,
        start=start,
        per_module=per_module,
        ops=ops,
        levels=levels,
        objective=objective,
        steps=steps,
        seed=seed,
        folder=folder,
        resume=resume,
        progress=progress,
    )
