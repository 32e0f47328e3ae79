"""How long each model is trained in each precision, so that the demo ends in about a minute on any processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...low_kernels import has_instructions
from .models import MODELS
from .training import AUTOCAST, PRECISIONS, Digits, Precision, step_seconds, steps

_SECONDS = 40.0  # that everything may take before torch.autocast, whose accuracy the check does not ask for, is cut short
_OF_AUTOCAST = 4.0  # seconds that it then has for each model
_MOST_SECONDS = 200.0  # that the rest may take before it is trained for fewer epochs
_LEAST_EPOCHS = 2


@dataclass(frozen=True)
class Run:
    """One model in one precision: the epochs that its learning rate is made for, how many steps of them it takes, and a step's time."""

    model: str
    precision: Precision
    epochs: int
    steps: int
    step_seconds: float

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        return self.steps * self.step_seconds


@dataclass(frozen=True)
class Plan:
    """The runs, and whether they are all that the demo does where there is time."""

    runs: Sequence[Run]
    is_autocast_short: bool = False
    share: float = 1.0  # of the epochs

    @property
    def seconds(self) -> float:
        """About how long all of it takes."""
        return sum(run.seconds for run in self.runs)

    def about(self) -> list[str]:
        """Return what is going to be done, in lines."""
        lines = [f"This takes about {max(5, round(self.seconds, -1)):.0f} seconds here."]
        if self.is_autocast_short:
            short = [run for run in self.runs if run.precision is AUTOCAST]
            lines.append(
                f"torch.autocast is slow here{_because()}: it takes "
                f"{' and '.join(str(run.steps) for run in short)} steps, enough to see what they cost, and has no accuracy."
            )
        if self.share < 1:
            lines.append(
                f"Products are slow here, too: the models are trained for {self.share:.0%} of their epochs. "
                "HMP_LOW_KERNELS=auto computes them in float32, and takes a minute."
            )
        return lines


def plan(data: Digits, epochs: int | None = None) -> Plan:
    """Return what to train for how long, by the time that a step takes here.

    Args:
        data: What the models are trained on.
        epochs: How often they see it; None for each model's own number.
    """
    full = Plan([
        Run(name, precision, epochs or make.epochs, steps(data, epochs or make.epochs), step_seconds(make, data, precision))
        for name, make in MODELS.items()
        for precision in PRECISIONS
    ])  # fmt: skip
    if full.seconds <= _SECONDS:
        return full
    cut = [_cut_short(run) if run.precision is AUTOCAST else run for run in full.runs]
    short = Plan(cut, is_autocast_short=cut != list(full.runs))
    if short.seconds <= _MOST_SECONDS:
        return short
    share = _MOST_SECONDS / short.seconds
    return replace(short, runs=[run if run.precision is AUTOCAST else _of_epochs(run, data, share) for run in short.runs], share=share)


def _because() -> str:
    return "" if has_instructions(torch.bfloat16) else " (this processor has no bfloat16 instructions)"


def _cut_short(run: Run) -> Run:
    return replace(run, steps=min(run.steps, max(1, int(_OF_AUTOCAST / run.step_seconds))))


def _of_epochs(run: Run, data: Digits, share: float) -> Run:
    fewer = max(_LEAST_EPOCHS, int(run.epochs * share))
    return replace(run, epochs=min(run.epochs, fewer), steps=steps(data, min(run.epochs, fewer)))
