"""GaudiTrainer: transformers' Trainer with a Gaudi configuration, and the memory and speeds that it logs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from transformers import Seq2SeqTrainer, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

import hmp

from ... import HmpError
from ..habana.memory import memory_stats
from ..habana.no_ops import warn_once
from ..habana.optimizers import FusedAdamW
from ..memory_statistics import in_gigabytes
from ..transformers import HMPCallback
from .arguments import GaudiTrainingArguments
from .configuration import GaudiConfig

__all__ = ["GaudiSeq2SeqTrainer", "GaudiTrainer", "get_hpu_memory_stats", "set_seed"]


def get_hpu_memory_stats() -> dict[str, float]:
    """Return the memory in use, the most in use, and the total, in GB as their names say. On the CPU they are the process's."""
    return {f"{name} (GB)": size or 0.0 for name, size in in_gigabytes(memory_stats()).items()}


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


class GaudiTrainer(Trainer):
    """Trainer with the casts, the optimizer and the logs of a Gaudi configuration: `GaudiTrainer(model, gaudi_config, args, ...)`.

    Calls of the model and the computation of the loss are cast by the configuration's lists. Gradients are computed, clipped and applied
    without casts. Trainer clips with torch's foreach kernels, as use_fused_clip_norm asks for.

    Args:
        model: The model, or None with `model_init`.
        gaudi_config: The configuration; None reads `args.gaudi_config_name`.
        args: GaudiTrainingArguments.
        data_collator: Trainer's.
        train_dataset: Trainer's.
        eval_dataset: Trainer's.
        tokenizer: Trainer's `processing_class`.
        callbacks: Trainer's.
        **others: Other arguments of Trainer's, by keyword.

    Raises:
        HmpError: `args` are not GaudiTrainingArguments, or `use_habana` is set without a configuration.
    """

    args: GaudiTrainingArguments

    def __init__(
        self,
        model: Any = None,
        gaudi_config: GaudiConfig | None = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: Any = None,
        *,
        callbacks: Any = None,
        **others: Any,
    ) -> None:
        if args is None:
            args = GaudiTrainingArguments(output_dir="tmp_trainer")
        if not isinstance(args, GaudiTrainingArguments):
            raise HmpError(
                f"{type(self).__name__} expected args= to be GaudiTrainingArguments, got {type(args).__name__}; use optimum.habana's class"
            )
        self.gaudi_config = _configuration(gaudi_config, args)
        self._policy = self.gaudi_config.policy if args.use_habana else None
        self._warm_up = WarmUp(args.throughput_warmup_steps)
        added: list[Any] = [self._warm_up]
        if self._policy is not None:
            added.append(HMPCallback(self._policy, verbose=self.gaudi_config.hmp_is_verbose))
        if tokenizer is not None:
            others["processing_class"] = tokenizer
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, callbacks=[*(callbacks or []), *added], **others)

    @contextlib.contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:  # type: ignore[override]
        """Return the context of the model's call and its loss, in which the configuration's casts are active."""
        # HMPCallback applies scoped entries to the modules
        casts = contextlib.nullcontext() if self._policy is None else hmp.casts(self._policy.unscoped)
        with super().compute_loss_context_manager(), casts:
            yield

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return Trainer's optimizer, or FusedAdamW if the configuration sets use_fused_adam."""
        given = self.optimizer
        made = super().create_optimizer(*args, **kwargs)
        if given is None and self.args.use_habana and self.gaudi_config.use_fused_adam:
            # its groups have the weight decay of each parameter
            groups = [{name: group[name] for name in ("params", "weight_decay")} for group in made.param_groups if group["params"]]
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = FusedAdamW(groups, lr=self.args.learning_rate, betas=betas, eps=self.args.adam_epsilon)
        return self.optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does, with the memory in the main process and the speeds after the warm-up at the end of training."""
        if self.args.use_habana:
            if "train_samples_per_second" in logs and self.args.throughput_warmup_steps > 0:
                logs.update(self._speeds())
            if self.is_world_process_zero():
                logs.update(get_hpu_memory_stats())
        super().log(logs, *args, **kwargs)

    def _speeds(self) -> dict[str, float]:
        per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        if self.args.max_steps <= 0:
            loader: Any = self.callback_handler.train_dataloader
            samples = self.num_examples(loader) * self.args.num_train_epochs
            per_step = samples / self.state.max_steps  # the last batch of an epoch may be smaller
        speeds = self._warm_up.speeds(self.state.global_step, per_step)
        if not speeds:
            warn_once(
                "throughput_warmup_steps",
                f"throughput_warmup_steps= expected fewer than the {self.state.global_step} steps of this run, got "
                f"{self.args.throughput_warmup_steps}; the logged speeds are those of all steps. Use a smaller number, or train for longer",
            )
        return speeds


def _configuration(given: GaudiConfig | None, args: GaudiTrainingArguments) -> GaudiConfig:
    if given is not None:
        return copy.deepcopy(given)
    if args.gaudi_config_name is not None:
        return GaudiConfig.from_pretrained(args.gaudi_config_name)
    if args.use_habana:
        raise HmpError(
            "use_habana=True expected a Gaudi configuration, got none; pass gaudi_config=GaudiConfig(...), or set gaudi_config_name"
        )
    return GaudiConfig()


class GaudiSeq2SeqTrainer(GaudiTrainer, Seq2SeqTrainer):
    """Seq2SeqTrainer in the same way: see GaudiTrainer."""
