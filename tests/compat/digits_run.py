"""A script as Optimum's guide has it, for hmp run --habana: a vision transformer on scikit-learn's digits, in one process or several."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from optimum.habana import GaudiConfig, GaudiTrainer, GaudiTrainingArguments
from optimum.habana.utils import set_seed
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

set_seed(0)
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
rows = [
    {"pixel_values": torch.tensor(digits.images[i] / 4 - 2, dtype=torch.float32)[None], "labels": torch.tensor(digits.target[i])}
    for i in order
]
model = ViTForImageClassification(
    ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1,
    )
)  # fmt: skip
folder = Path(sys.argv[1])
casts = "--plain" not in sys.argv
gaudi_config = GaudiConfig(use_habana_mixed_precision=casts, use_fused_adam=True, use_fused_clip_norm=True)
gaudi_config.save_pretrained(folder / "config")
training_args = GaudiTrainingArguments(
    output_dir=str(folder / "out"),
    use_habana=True,
    use_lazy_mode=True,
    gaudi_config_name=str(folder / "config"),
    throughput_warmup_steps=2,
    per_device_train_batch_size=32 if "--two" not in sys.argv else 16,
    per_device_eval_batch_size=64,
    learning_rate=3e-3,
    num_train_epochs=8,
    logging_steps=20,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = GaudiTrainer(
    model=model,
    gaudi_config=gaudi_config,
    args=training_args,
    train_dataset=rows[:1400],
    eval_dataset=rows[1400:],
    compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
)
seen: set[str] = set()
model.get_submodule("classifier").register_forward_hook(lambda module, args, out: seen.add(str(out.dtype)))
result = trainer.train()
found = {
    "accuracy": trainer.evaluate()["eval_accuracy"],
    "dtypes": sorted(seen),
    "history": trainer.state.log_history,
    "metrics": result.metrics,
    "weight": model.get_submodule("classifier").weight.detach().double().sum().item(),
    "parameters": sorted({str(each.dtype) for each in model.parameters()}),
}
(folder / f"rank{training_args.process_index}.json").write_text(json.dumps(found))
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    sys.stdout.flush()
    import os

    os._exit(0)  # a group of gloo's that dies may wait for its threads for ever (see leave() of ddp_run.py)
