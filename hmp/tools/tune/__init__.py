"""tune(): the cheapest op lists that keep a model within a tolerance of float32, measured and verified on the user's own task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from ...core.policy import Policy
    from .result import Tolerance, TuneResult


def tune(  # noqa: PLR0913
    model: torch.nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Any],
    tolerance: float | Mapping[str, float] | Tolerance = 0.01,
    metric: Callable[[Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    seconds: float | None = None,
    max_trials: int | None = None,
    start: str | Path | Policy = "autocast",
    per_module: bool = False,
    ops: Collection[str] | None = None,
    levels: Collection[str] = ("bf16", "fp32"),
    objective: Literal["time", "memory", "bytes"] = "time",
    steps: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = True,
    progress: bool | None = None,
    **removed: Any,
) -> TuneResult:
    """Search for the cheapest op lists that keep a model within a tolerance of float32.

    Each trial trains or evaluates the model under one policy, from the same state and seed. The search moves ops to the low-precision dtype
    in a fixed order: first those that change the loss least for what they save. Bisection finds how many can be moved within the tolerance.
    Afterwards model, random state and torch are as before.

    Args:
        model: the model. No policy may be applied to it.
        batches: the batches, which are used in turns. A batch that is a mapping is copied for each use; its tensors are not.
        loss: a function; `loss(model, batch)` returns a scalar tensor.
        tolerance: how much worse than float32's the metric may be or, without a metric, how far the loss may differ, relative to float32's.
            Or a mapping with bounds for "loss", "metric" and "gradient", the last being the smallest cosine similarity of the gradients.
        metric: a function; `metric(model)` returns a number, larger is better (an accuracy). It is called after training, under the policy.
        optimizer: a function; `optimizer(model)` returns an optimizer of the model's parameters. With it a trial trains for `steps` steps,
            and its loss is the mean over the last pass over the batches. Without it, a trial evaluates: the mean over all batches.
        seconds: the search starts no new trial after this time.
        max_trials: the largest number of trials.
        start: the policy to start from. Ops that are not decided stay on its lists; its low-precision dtype and FP8 recipe are used.
        per_module: decide each op separately in each module, and write entries with a scope.
        ops: the ops to decide. By default those that the model calls and that `start` or a preset has on its BF16 or FP32 list.
        levels: with "fp8" among them, as many matrix multiplication FLOPs as the tolerance allows move to the FP8 list. On a device with
            FP8, if the objective is "time", these lists must also be faster.
        objective: what to minimise: the "time" of a step, its activation memory ("memory"), or its activation memory with packed
            activations ("bytes"; packed as in the preset saved8).
        steps: the training steps of a trial. Default: one pass over the batches, but at least 20.
        seed: the seed of every trial.
        folder: a folder that holds the best lists so far at any time (even after Ctrl-C), and tune.json with all measurements.
        resume: continue an earlier search with the same settings in `folder`. If float32's loss has changed, that is an error. False starts
            anew.
        progress: show a progress bar (tqdm) or lines on stderr. None: only on a terminal.
        **removed: parameters of earlier versions, which raise an error.

    Returns:
        The result: `policy` is the cheapest policy within the tolerance, `trials` and `units` hold the measurements.

    Raises:
        HmpError: for wrong arguments, if float32's loss is not finite, and if no lists are within the tolerance.
        TypeError: for `budget`, which is now `seconds` or `max_trials`.

    Example:
        >>> net, data = torch.nn.Linear(4, 1), [torch.randn(8, 4)]
        >>> result = hmp.tune(net, data, loss=lambda model, x: model(x).square().mean(), objective="memory", max_trials=8)
        >>> folder = result.save("tuned")
    """
    if removed:
        raise TypeError(_about_removed(removed))
    from . import search  # here, so that `import hmp` does not pay for it
    from .result import Objective

    return search.run(
        search.decided(model, start, ops=ops, per_module=per_module, levels=levels, objective=objective),
        search.Budget(seconds, max_trials),
        search.as_tolerance(tolerance, metric is not None),
        search.Task(model, batches, loss, metric, optimizer, steps, seed),
        objective=Objective.TIME if objective == "time" else Objective.MEMORY,
        folder=None if folder is None else Path(folder),
        resume=resume,
        progress=progress,
    )


def _about_removed(names: Collection[str]) -> str:
    if "budget" in names:
        return "tune() has no argument budget any longer; give seconds=600 for ten minutes, or max_trials=30"
    return f"tune() got an unexpected keyword argument {next(iter(names))!r}"
