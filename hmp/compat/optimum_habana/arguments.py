"""GaudiTrainingArguments: transformers' TrainingArguments with Optimum's fields for Gaudi."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Optional

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from ..habana.device_map import actual_device
from ..habana.no_ops import warn_once

_OF_GAUDI = "what happens here"  # in the metadata of fields that have an effect on Gaudi only


def _of_gaudi(happens: str) -> bool:
    made: bool = field(default=False, metadata={"help": f"No effect: {happens}.", _OF_GAUDI: happens})
    return made


@dataclass
class GaudiTrainingArguments(TrainingArguments):
    """TrainingArguments that train on the device that "hpu" is mapped to, if use_habana is True.

    Raises:
        ValueError: A field of Gaudi's is set without use_habana, bf16 or fp16 is set, or throughput_warmup_steps is below 0.
    """

    use_habana: bool = field(default=False, metadata={"help": "Train on the device that 'hpu' is mapped to."})
    gaudi_config_name: Optional[str] = field(default=None, metadata={"help": "A gaudi_config.json, or the folder that holds one."})
    use_lazy_mode: bool = _of_gaudi("ops run when they are called")
    use_hpu_graphs: bool = _of_gaudi("the model runs op by op")
    use_hpu_graphs_for_inference: bool = _of_gaudi("the model runs op by op")
    use_hpu_graphs_for_training: bool = _of_gaudi("the model runs op by op")
    pipelining_fwd_bwd: bool = _of_gaudi("ops run when they are called")
    non_blocking_data_copy: bool = _of_gaudi("Trainer copies the data")
    throughput_warmup_steps: int = field(default=0, metadata={"help": "Leave these first steps out of train_samples_per_second."})
    # Optimum's defaults that differ from Trainer's
    adam_epsilon: float = field(default=1e-6, metadata={"help": "Epsilon of AdamW."})
    ddp_bucket_cap_mb: Optional[int] = field(default=230, metadata={"help": "DistributedDataParallel's bucket_cap_mb."})
    ddp_find_unused_parameters: Optional[bool] = field(default=False, metadata={"help": "DistributedDataParallel's argument."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Leave NaN and Inf out of the losses that are logged."})
    # names of older scripts that later releases of transformers lack
    evaluation_strategy: Optional[str] = field(default=None, metadata={"help": "eval_strategy's former name."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Read by scripts: the output folder may contain files."})

    def __post_init__(self) -> None:
        without_effect = {each.name: each.metadata[_OF_GAUDI] for each in fields(self) if _OF_GAUDI in each.metadata}
        asked = [name for name in (*without_effect, "gaudi_config_name") if getattr(self, name)]
        if not self.use_habana and asked:
            raise ValueError(
                f"{', '.join(asked)}: expected use_habana=True with it, got use_habana=False; set use_habana=True, or leave it out"
            )
        if self.bf16 or self.fp16 or self.bf16_full_eval or self.fp16_full_eval:
            raise ValueError(
                "GaudiTrainingArguments: expected bf16 and fp16 to be False, got True: the op lists of the Gaudi configuration decide; "
                "set use_habana_mixed_precision in it, or use transformers' TrainingArguments and Trainer"
            )
        if self.throughput_warmup_steps < 0:
            raise ValueError(f"throughput_warmup_steps= expected a number >= 0, got {self.throughput_warmup_steps}")
        if self.evaluation_strategy is not None:
            self.eval_strategy, self.evaluation_strategy = self.evaluation_strategy, None
        if self.use_habana:
            for name in [each for each in asked if each in without_effect]:
                warn_once(name, f"{name} does nothing without Habana's software: {without_effect[name]}. This is logged once")
            self._place()
        super().__post_init__()  # type: ignore[no-untyped-call]

    def _place(self) -> None:
        """Have Trainer and accelerate train on the device that "hpu" is mapped to."""
        if actual_device().type == "cpu":  # raises without a device map
            self.use_cpu = True
        if self.ddp_backend == "hccl":
            self.ddp_backend = None  # accelerate chooses that of the device
        if self.torch_compile_backend == "hpu_backend" or (self.torch_compile_backend is None and self.torch_compile):
            self.torch_compile_backend = "inductor"


@dataclass
class GaudiSeq2SeqTrainingArguments(GaudiTrainingArguments, Seq2SeqTrainingArguments):
    """Seq2SeqTrainingArguments with the same fields."""
