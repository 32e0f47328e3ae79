"""Samples and steps per second without the first steps of a training, which a warm-up makes slow."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class WarmUp(TrainerCallback):
    """Notes when the first `steps` steps are over, of those that a call of train() makes."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first_counted = 0
        self._over: float | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A training begins, maybe at a checkpoint's step."""
        self._first_counted, self._over = state.global_step + self._steps, None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step begins: the first that counts sets the clock."""
        if self._over is None and state.global_step >= self._first_counted:
            self._over = perf_counter()

    def speeds(self, step: int, samples_per_step: float) -> dict[str, float]:
        """The speeds since the warm-up was over, under Trainer's names; none where it was not over before step `step`."""
        if self._over is None or step <= self._first_counted:
            return {}
        per_second = (step - self._first_counted) / (perf_counter() - self._over)
        return {"train_samples_per_second": round(samples_per_step * per_second, 3), "train_steps_per_second": round(per_second, 3)}
