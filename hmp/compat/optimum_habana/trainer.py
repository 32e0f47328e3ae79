"""GaudiTrainer: transformers' Trainer, which trains as a Gaudi configuration says."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from transformers import Seq2SeqTrainer, Trainer

import hmp

from ... import HmpError
from ..habana.nothing import say_once
from ..habana.optimizers import FusedAdamW
from ..transformers import HMPCallback
from .arguments import GaudiTrainingArguments
from .configuration import GaudiConfig
from .statistics import get_hpu_memory_stats
from .throughput import WarmUp

_REBUILD = numpy.empty(0).__reduce__()[0]  # NumPy 1 and 2 call it by different names
_OF_NUMPYS_STATE: list[Any] = [
    *((_REBUILD, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    numpy.ndarray,
    numpy.dtype,
    type(numpy.dtype("uint32")),
]


class GaudiTrainer(Trainer):
    """`GaudiTrainer(model, gaudi_config, args, train_dataset=...)`: Trainer, with the configuration's casts, optimizer and logs.

    Every call of the model, and a loss that is computed of what it gives, is cast by the configuration's lists; gradients are computed,
    clipped and applied without casts. Trainer clips on torch's foreach kernels, which is what use_fused_clip_norm asks for.
    """

    args: GaudiTrainingArguments

    def __init__(  # noqa: PLR0913
        self,
        model: Any = None,
        gaudi_config: GaudiConfig | None = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: Any = None,
        model_init: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        preprocess_logits_for_metrics: Any = None,
        **others: Any,
    ) -> None:
        if args is None:
            args = GaudiTrainingArguments(output_dir="tmp_trainer")
        if not isinstance(args, GaudiTrainingArguments):
            raise HmpError(f"{type(self).__name__} takes GaudiTrainingArguments, not {type(args).__name__}; give it those")
        self.gaudi_config = _configuration(gaudi_config, args)
        self._policy = self.gaudi_config.policy if args.use_habana else None
        self._warm_up = WarmUp(args.throughput_warmup_steps)
        added: list[Any] = [self._warm_up]
        if self._policy is not None:
            added.append(HMPCallback(self._policy, verbose=self.gaudi_config.hmp_is_verbose))
        if tokenizer is not None:
            later = "processing_class" in inspect.signature(Trainer.__init__).parameters
            others["processing_class" if later else "tokenizer"] = tokenizer
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            model_init=model_init,
            compute_metrics=compute_metrics,
            callbacks=[*(callbacks or []), *added],
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            **others,
        )

    @contextlib.contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:  # type: ignore[override]
        """The region of a model's call and its loss, in which the configuration's casts are in force."""
        # scoped lines speak of modules, which HMPCallback sees to
        casts = contextlib.nullcontext() if self._policy is None else hmp.casts(self._policy.unscoped)
        with super().compute_loss_context_manager(), casts:
            yield

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's optimizer, or FusedAdamW where the configuration says use_fused_adam."""
        given = self.optimizer
        made = super().create_optimizer(*args, **kwargs)
        if given is None and self.args.use_habana and self.gaudi_config.use_fused_adam:
            # its groups say which parameters decay
            groups = [{name: group[name] for name in ("params", "weight_decay")} for group in made.param_groups if group["params"]]
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = FusedAdamW(groups, lr=self.args.learning_rate, betas=betas, eps=self.args.adam_epsilon)
        return self.optimizer

    def _load_rng_state(self, checkpoint: Any) -> None:
        # releases before 4.47 were made for a torch that loads NumPy's arrays unasked
        with torch.serialization.safe_globals(_OF_NUMPYS_STATE):
            super()._load_rng_state(checkpoint)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs as Trainer does; in the main process with the memory, at a training's end with the speeds after the warm-up."""
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
            say_once(
                "throughput_warmup_steps",
                f"throughput_warmup_steps is {self.args.throughput_warmup_steps} and no step came after them: the speeds are those of all "
                f"steps. Give fewer, or train for longer",
            )
        return speeds


def _configuration(given: GaudiConfig | None, args: GaudiTrainingArguments) -> GaudiConfig:
    if given is not None:
        return copy.deepcopy(given)
    if args.gaudi_config_name is not None:
        return GaudiConfig.from_pretrained(args.gaudi_config_name)
    if args.use_habana:
        raise HmpError("use_habana without a Gaudi configuration; give the trainer gaudi_config=GaudiConfig(...), or gaudi_config_name")
    return GaudiConfig()


class GaudiSeq2SeqTrainer(GaudiTrainer, Seq2SeqTrainer):
    """Seq2SeqTrainer in the same way."""
