"""`optimum.habana.utils`, memory statistics and seeds, and the speeds that GaudiTrainer logs."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers import set_seed as seed_everything

from ..habana.memory import memory_stats


def get_hpu_memory_stats() -> dict[str, float]:
    """Return the memory in use, the most in use, and the total, in GB as their names say. On the CPU they are the process's."""
    stats = memory_stats()
    names = {"memory_allocated (GB)": "InUse", "max_memory_allocated (GB)": "MaxInUse", "total_memory_available (GB)": "Limit"}
    return {name: round(stats[key] / 2**30, 2) for name, key in names.items()}


def set_seed(seed: int) -> None:
    """Seed Python's generator, NumPy's, and torch's on every device."""
    seed_everything(seed)


class WarmUp(TrainerCallback):
    """Starts the clock after the first `steps` steps of a call of train(), which are slower than the others."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first_counted = 0
        self._over: float | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Reset the clock: training begins, possibly at a checkpoint's step."""
        self._first_counted, self._over = state.global_step + self._steps, None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock at the first step that counts."""
        if self._over is None and state.global_step >= self._first_counted:
            self._over = perf_counter()

    def speeds(self, step: int, samples_per_step: float) -> dict[str, float]:
        """Return samples and steps per second since the warm-up, under Trainer's names; {} if it was not over before step `step`."""
        if self._over is None or step <= self._first_counted:
            return {}
        per_second = (step - self._first_counted) / (perf_counter() - self._over)
        return {"train_samples_per_second": round(samples_per_step * per_second, 3), "train_steps_per_second": round(per_second, 3)}
