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

    Each trial trains or evaluates the model under one policy, from the same state and seed. The ops are added to the low-precision dtype in
    one order, those first that change the loss least for what they gain, and bisection finds those that are too many. Afterwards model,
    random state and torch are as before.

    Args:
        model: the model, to which no policy is applied.
        batches: the batches, which are used in turns. A batch that is a mapping is copied for each use; its tensors are not.
        loss: gives a scalar tensor for `loss(model, batch)`.
        tolerance: the most by which the metric may be worse than float32's or, where there is no metric, the loss may differ from it,
            relative to it; or a mapping with bounds for "loss", "metric" and "gradient", the last being the least cosine between the
            gradient and float32's.
        metric: gives a number for `metric(model)`, the larger the better (an accuracy). It is called after training, under the policy.
        optimizer: gives an optimizer over the model's parameters for `optimizer(model)`. With it a trial trains `steps` steps, and its
            loss is the mean over the last pass over the batches; without it, the mean over all batches.
        seconds: the search begins no trial after so many seconds.
        max_trials: the search makes at most so many trials.
        start: the policy to begin with. It says what is done with ops that are not decided, and its low-precision dtype and FP8 recipe are
            used.
        per_module: decides each op in each module by itself, and writes scoped entries.
        ops: the ops to decide. By default those that the model calls and that `start` or a preset has on its BF16 or FP32 list.
        levels: with "fp8" among them, as much of the matrix products' work as the tolerance allows then moves to the FP8 list. Work is
            counted in floating-point operations, since most devices emulate FP8. On one that computes in FP8 the lists must also be
            faster, where time is the objective.
        objective: what is made small: the "time" of a step, or what it saves for backward, in bytes, by the lists of casts alone
            ("memory") or also by packing what ops keep, with the recipe of the preset saved8 ("bytes").
        steps: the training steps of a trial. By default once over all batches, and 20 at least.
        seed: the seed of every trial.
        folder: holds the best lists so far at any time (after Ctrl-C too), and tune.json with all that was measured.
        resume: goes on with what an earlier search with the same settings left in `folder`. Float32 runs again first: another loss of
            its is another task. False begins anew.
        progress: shows a bar (tqdm) or lines on stderr. None shows them on a terminal.
        **removed: parameters of earlier versions, which are refused.

    Returns:
        What was found: `policy` is the cheapest policy within the tolerance, `trials` and `units` hold what was measured.

    Raises:
        HmpError: for wrong arguments, where float32 itself gives no finite loss, and where no lists are within the tolerance.
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
        return "tune() takes no budget: give seconds=600 for ten minutes, or max_trials=30"
    return f"tune() got an unexpected keyword argument {next(iter(names))!r}"
