"""tune(): the cheapest op lists that keep a model within a tolerance of float32, measured and verified on the user's own task."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import HmpError

if TYPE_CHECKING:
    import torch

    from ...core.policy.policy import Policy
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
    objective: str = "time",
    steps: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool | None = None,
) -> TuneResult:
    """Search for the cheapest op lists that keep a model within a tolerance of float32.

    Each trial trains or evaluates the model under one policy, from the same state and seed. The search moves ops to the low-precision
    dtype, and then to further lists, in a fixed order: first those that change the loss least for what they save. Bisection finds how many
    can be moved within the tolerance. Afterwards model, random state and torch are as before.

    Args:
        model: the model, not compiled. No policy may be applied to it.
        batches: the batches, which are used in turns. A batch that is a mapping is copied for each use; its tensors are not.
        loss: a function; `loss(model, batch)` returns a scalar tensor.
        tolerance: how much worse than float32's the metric may be or, without a metric, how far the loss may differ, relative to float32's.
            Or a mapping with bounds for "loss" and "metric".
        metric: a function; `metric(model)` returns a number, larger is better (an accuracy). It is called after training, under the policy.
        optimizer: a function; `optimizer(model)` returns an optimizer of the model's parameters. With it a trial trains for `steps` steps,
            and its loss is the mean over the last pass over the batches. Without it, a trial evaluates: the mean over all batches.
        seconds: the search starts no new trial after this time.
        max_trials: the largest number of trials.
        start: the policy to start from. Ops that are not decided stay on its lists; its low-precision dtype and its recipes are used.
        per_module: decide each op separately in each module, and write entries with a scope.
        ops: the ops to decide. By default those that the model calls and that `start` or a preset has on its BF16 or FP32 list.
        levels: the lists that ops may move to: "bf16", "fp32" and those of further kinds; an error names them. As much as the tolerance
            allows moves there. If the objective is "time", and the device has kernels for it, these lists must also be faster.
        objective: what to minimise: the "time" of a step, its activation memory ("memory"), or its activation memory where what ops save
            may be in a form of fewer bits ("bytes").
        steps: the training steps of a trial. Default: one pass over the batches, but at least 20.
        seed: the seed of every trial.
        folder: a folder for the lists, and tune.json with all measurements. After Ctrl-C it has the best lists so far.
        progress: write a line on stderr for each trial. None: only on a terminal.

    Returns:
        The result: `policy` is the cheapest policy within the tolerance, `trials` and `units` hold the measurements.

    Raises:
        HmpError: for wrong arguments, if float32's loss is not finite, and if no lists are within the tolerance.

    Example:
        >>> net, data = torch.nn.Linear(4, 1), [torch.randn(8, 4)]
        >>> result = hmp.tune(net, data, loss=lambda model, x: model(x).square().mean(), objective="memory", max_trials=8)
        >>> folder = result.save("tuned")
    """
    from .result import as_tolerance, check_folder  # here, as what follows, so that `import hmp` does not pay for it
    from .search import Budget, Search, decided
    from .task import Task

    if not (progress is None or isinstance(progress, bool)):
        raise HmpError(f"invalid progress={progress!r}: expected True, False or None")
    return Search(
        decisions=decided(model, start, ops=ops, per_module=per_module, levels=levels, objective=objective),
        budget=Budget(seconds, max_trials),
        tolerance=as_tolerance(tolerance, metric is not None),
        task=Task(model, batches, loss, metric, optimizer, steps, seed),
        objective="time" if objective == "time" else "memory",
        folder=check_folder(folder),
        shows_progress=sys.stderr is not None and (sys.stderr.isatty() if progress is None else progress),  # None under pythonw
    ).run()
