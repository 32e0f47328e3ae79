"""verify(): one step of a model, in which every call must follow its list."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..core.casting import each_tensor
from ..core.policy.policy import Policy
from . import model_call
from .model_state import preserve_state
from .record.recorder import record
from .record.report import Report
from .record.rows import check_allowed

Loss = Callable[[Any], torch.Tensor]


def verify(
    model: torch.nn.Module,
    batch: Any,
    policy: Policy | str | Path | None = None,
    *,
    loss: Loss | None = None,
    allow: Collection[str] = (),
) -> Report:
    """Run one step of a model, forward and backward, and verify that every call follows its list.

    This is `record()`, one step, and `Report.verify()`. Torch, the model, gradients and the random state are as before when it returns;
    meanwhile the weights take their memory twice. Compiled code runs uncompiled.

    Args:
        model: The module.
        batch: What the model is called with: a mapping as keywords, a tuple or list as positional arguments, anything else as the only one.
        policy: What it runs under. Default: what hmp.apply() gave the model, or the active policy.
        loss: Makes a scalar of what the model returns. Default: the output's `.loss`, else the sum of its floating tensors. Under
            `torch.no_grad()` the forward alone is run.
        allow: Kinds of violations that do not raise, see `Report.verify()`.

    Returns:
        The report of the step; `report.never_called` has the entries that no call matched.

    Raises:
        ViolationError: Calls did not follow their lists.
        HmpError: No op on a list was called, so nothing was verified, or the model has lazy modules that were never called.

    Example:
        >>> report = hmp.verify(torch.nn.Linear(4, 4), torch.randn(2, 4), "autocast")
    """
    model_call.check_module(model, "verify()")
    check_allowed(allow)
    region: Any = nullcontext() if policy is None else model_call.policy_context(model, model_call.chosen_policy(model, policy), model)
    with preserve_state(model, model.parameters()), record() as report:
        with region:
            output = model_call.call(model, batch)
            value = _loss_of(output, loss) if torch.is_grad_enabled() else None
            if value is not None:
                model_call.check_loss(value, "loss(output)" if loss is not None else "the sum of the model's output")
        if value is not None and value.requires_grad:
            value.backward()
    return report.verify(allow)


def _loss_of(output: Any, loss: Loss | None) -> torch.Tensor | None:
    found = loss(output) if loss is not None else model_call.own_loss(output)
    if found is not None:
        return found
    sums = [tensor.sum() for tensor in each_tensor((output,)) if tensor.requires_grad]
    return sum(sums[1:], sums[0]) if sums else None
