"""GaudiTrainingArguments: transformers' TrainingArguments with the fields that Optimum's have for Gaudi."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from ..habana.device_map import standing
from ..habana.nothing import say_once

# What is Gaudi's alone: field → what happens in its stead.
_NOTHING_HERE = {
    "use_lazy_mode": "ops run when they are called",
    "use_hpu_graphs": "the model runs op by op",
    "use_hpu_graphs_for_inference": "the model runs op by op",
    "use_hpu_graphs_for_training": "the model runs op by op",
    "pipelining_fwd_bwd": "ops run when they are called",
    "non_blocking_data_copy": "copies are made as Trainer makes them",
}


# Before 4.46 transformers reads the former name itself, before 4.41 no other, and no None for it.
_FORMER: Any = TrainingArguments.__dataclass_fields__.get("evaluation_strategy")


@dataclass
class GaudiTrainingArguments(TrainingArguments):
    """TrainingArguments for the device that stands for "hpu", with use_habana=True; without it they are TrainingArguments."""

    use_habana: bool = field(default=False, metadata={"help": "Train on the device that stands for 'hpu'."})
    gaudi_config_name: Optional[str] = field(default=None, metadata={"help": "A gaudi_config.json, or the folder that holds one."})
    use_lazy_mode: bool = field(default=False, metadata={"help": "Nothing here: ops run when they are called."})
    use_hpu_graphs: bool = field(default=False, metadata={"help": "Nothing here: the model runs op by op."})
    use_hpu_graphs_for_inference: bool = field(default=False, metadata={"help": "Nothing here: the model runs op by op."})
    use_hpu_graphs_for_training: bool = field(default=False, metadata={"help": "Nothing here: the model runs op by op."})
    pipelining_fwd_bwd: bool = field(default=False, metadata={"help": "Nothing here: ops run when they are called."})
    non_blocking_data_copy: bool = field(default=False, metadata={"help": "Nothing here: copies are made as Trainer makes them."})
    throughput_warmup_steps: int = field(default=0, metadata={"help": "The first steps, which train_samples_per_second leaves out."})
    # Optimum's defaults, where they are others than Trainer's
    adam_epsilon: float = field(default=1e-6, metadata={"help": "Epsilon of AdamW."})
    ddp_bucket_cap_mb: Optional[int] = field(default=230, metadata={"help": "DistributedDataParallel's bucket_cap_mb."})
    ddp_find_unused_parameters: Optional[bool] = field(default=False, metadata={"help": "DistributedDataParallel's argument."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Leave NaN and Inf out of the losses that are logged."})
    # names that scripts of that time use and later releases of transformers lack
    evaluation_strategy: Optional[str] = field(
        default=None if _FORMER is None else _FORMER.default, metadata={"help": "eval_strategy's former name."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "For scripts to read: the output folder may hold files."})

    def __post_init__(self) -> None:
        asked = [name for name in (*_NOTHING_HERE, "gaudi_config_name") if getattr(self, name)]
        if not self.use_habana and asked:
            raise ValueError(f"{', '.join(asked)} cannot be used without use_habana; give use_habana=True as well")
        if self.bf16 or self.fp16 or self.bf16_full_eval or self.fp16_full_eval:
            raise ValueError(
                "GaudiTrainingArguments takes no bf16 or fp16; set use_habana_mixed_precision in the Gaudi configuration, whose op "
                "lists decide, or use transformers' TrainingArguments and Trainer"
            )
        if self.throughput_warmup_steps < 0:
            raise ValueError(f"throughput_warmup_steps is {self.throughput_warmup_steps}; it must be 0 or more")
        if _FORMER is None and self.evaluation_strategy is not None:
            self.eval_strategy, self.evaluation_strategy = self.evaluation_strategy, None
        if self.use_habana:
            for name in asked:
                if name in _NOTHING_HERE:
                    say_once(name, f"{name} does nothing without Habana's software: {_NOTHING_HERE[name]}. Said once")
            self._place()
        super().__post_init__()  # type: ignore[no-untyped-call]

    def _place(self) -> None:
        """Has Trainer and accelerate train on the device that stands for "hpu"."""
        on_cpu = standing().type == "cpu"  # an error where nothing stands for it
        if on_cpu:
            setattr(self, "use_cpu" if "use_cpu" in vars(self) else "no_cuda", True)
        if on_cpu and "xpu_backend" in vars(self):  # before 4.29, without accelerate
            self.xpu_backend = "gloo"
        if getattr(self, "ddp_backend", None) == "hccl":
            self.ddp_backend = None  # accelerate takes the one of the device
        compiler = getattr(self, "torch_compile_backend", None)  # 4.25 has none
        if compiler == "hpu_backend" or (compiler is None and getattr(self, "torch_compile", False)):
            self.torch_compile_backend = "inductor"


@dataclass
class GaudiSeq2SeqTrainingArguments(GaudiTrainingArguments, Seq2SeqTrainingArguments):
    """Seq2SeqTrainingArguments in the same way."""
