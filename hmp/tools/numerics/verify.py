"""verify(): one step of a model, in which every call must run as the line of its list says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ...core.casting import each_tensor
from ...core.policy import Policy
from ..report.report import Report
from ..report.verified import verified
from . import calling
from .as_before import as_before

Loss = Callable[[Any], torch.Tensor]


def verify(
    model: torch.nn.Module,
    batch: Any,
    policy: Policy | str | Path | None = None,
    *,
    loss: Loss | None = None,
    allow: Collection[str] = (),
) -> Report:
    """The report of one step, forward and backward, in which every call on the BF16, FP32 or FP8 list ran as its line says.

    Raises ViolationError, an AssertionError, with a table of the calls that did not: op, line, module, the dtype that was wanted and the
    one that it got, who had the last word, and what may be done. `allow` names kinds that are no error: "region", "island" (a model's own
    torch.autocast(enabled=False)), "disable_casts", "no kernel", "outside" (a part of an applied model, or another method of it, called
    outside of its calls), "past hmp", "backward", "rounded before" (an op on the FP32 list whose weight or input came in a low dtype, from
    the caller, a hook or a wrapper and not by hmp), "torch".
    Names on the lists that no call matched are in the message as a notice, and in `report.never_called`. HmpError where no call followed a
    line, for then nothing was shown.

    `batch` is what the model is called with: a mapping as keywords, a tuple or list as positional arguments, anything else as the only
    one. Without a `policy` it is the one that hmp.apply() gave the model, or that is in force here. `loss(output)` makes a scalar of what
    the model returns; without it the output's `.loss` is taken, else the sum of its floating tensors. Under torch.no_grad() the forward
    alone is run. Gradients, buffers and the random state are as before when it returns. Compiled code runs uncompiled.
    """
    calling.check_module(model, "verify()")
    region: Any = nullcontext() if policy is None else calling.region(model, calling.chosen_policy(model, policy), model)
    with verified(allow) as report, as_before(model, model.parameters()):
        with region:
            output = calling.call(model, batch)
            value = _loss_of(output, loss) if torch.is_grad_enabled() else None
        if value is not None and value.requires_grad:
            value.backward()
    return report


def _loss_of(output: Any, loss: Loss | None) -> torch.Tensor | None:
    if loss is not None:
        return loss(output)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    sums = [tensor.sum() for tensor in each_tensor((output,)) if tensor.requires_grad]
    return sum(sums[1:], sums[0]) if sums else None
