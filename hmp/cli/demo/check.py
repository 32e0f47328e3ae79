"""The demo's check of itself: every listed op ran in the dtype that its list says, at float32's accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

import hmp

from ...formatting import dtype_name
from .step_report import StepReport
from .training import Outcome

# The ATen ops in which a name of a list shows up, in a forward pass on the CPU.
_ATEN = {
    "batch_norm": ("native_batch_norm",),
    "conv2d": ("convolution",),
    "cross_entropy": ("_log_softmax", "nll_loss_forward"),
    "dropout": ("bernoulli_",),
    "embedding": ("embedding",),
    "layer_norm": ("native_layer_norm",),
    "linear": ("addmm",),
    "matmul": ("bmm",),
    "mul": ("mul",),
    "relu": ("relu",),
    "softmax": ("_softmax",),
    "t": ("t",),
    "truediv": ("div",),
}
_POINTS = 1.0


def named(policy: hmp.Policy, calls: Iterable[str]) -> dict[str, torch.dtype]:
    """Return those of the called names that the policy's lists name, each with the dtype of its list."""
    wanted = dict.fromkeys(policy.bf16, policy.dtype) | dict.fromkeys(policy.fp32, torch.float32)
    return {name: wanted[name] for name in sorted(calls) if name in wanted}


def op_failures(model: str, wanted: Mapping[str, torch.dtype], step: StepReport) -> list[str]:
    """Return one sentence for each ATen op of a wanted name that did not run in its dtype, or not in it alone."""
    failures = []
    for name, dtype in wanted.items():
        for op in _ATEN[name]:
            ran = step.dtypes(op)
            if ran != {dtype}:
                where = " and ".join(sorted(map(dtype_name, ran))) or "no dtype: it did not run"
                failures.append(f"{model}: the policy names {name} for {dtype_name(dtype)}, but aten.{op} ran in {where}")
    return failures


def accuracy_failures(reference: Outcome, other: Outcome) -> list[str]:
    """Return a sentence if the accuracies of two outcomes are more than one percentage point apart."""
    if reference.accuracy is None or other.accuracy is None:
        return [f"{other.model}: {other.precision} or {reference.precision} was not trained to the end"]
    if abs(reference.accuracy - other.accuracy) <= _POINTS:
        return []
    return [
        f"{other.model}: {other.precision} reached {other.accuracy:.1f} %, more than {_POINTS:g} point from "
        f"{reference.precision}'s {reference.accuracy:.1f} %"
    ]
