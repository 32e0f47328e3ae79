"""Scripts as Optimum's guide writes them, under hmp run --habana: alone, in two processes, and with the real optimum-habana."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_kit import HABANA, python, two_ranks

# optimum-habana 1.5 and what it was made for; the rest (torch, NumPy, ...) is what the tests run with.
REAL = """optimum-habana==1.5.0 optimum==1.8.6 transformers==4.28.1 tokenizers==0.13.3 accelerate==0.19.0 huggingface-hub==0.19.4
setuptools==80.9.0 requests urllib3 charset-normalizer idna certifi coloredlogs humanfriendly importlib-metadata zipp""".split()


GUIDE = """\
import os, torch
from transformers import BertConfig, BertForSequenceClassification
from optimum.habana import GaudiConfig, GaudiTrainer, GaudiTrainingArguments
import optimum.habana
torch.manual_seed(0)
print("real" if getattr(optimum.habana, "__file__", None) else "stand-in")
model = BertForSequenceClassification(
    BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
)
made = torch.Generator().manual_seed(1)
data = [{"input_ids": torch.randint(0, 99, (8,), generator=made), "labels": torch.tensor(i % 2)} for i in range(16)]
config = "config" + os.environ.get("RANK", "")
GaudiConfig(use_habana_mixed_precision=True, use_fused_adam=True, use_fused_clip_norm=True).save_pretrained(config)
gaudi_config = GaudiConfig.from_pretrained(config)
args = GaudiTrainingArguments(
    "out", max_steps=6, logging_steps=1, report_to=[], disable_tqdm=True, use_habana=True, use_lazy_mode=True, save_steps=3,
    throughput_warmup_steps=2, gaudi_config_name=config, OPTIONS
)
trainer = GaudiTrainer(model=model, gaudi_config=gaudi_config, args=args, train_dataset=data, eval_dataset=data)
seen = []
model.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda module, args, out: seen.append(str(out.dtype)))
trainer.train()
assert set(seen) == {"torch.bfloat16"}, seen
print("calls", len(seen))
seen.clear()
trainer.evaluate()
assert set(seen) <= {"torch.bfloat16"}
assert {str(each.dtype) for each in model.parameters()} == {"torch.float32"}
memory = {"memory_allocated (GB)", "max_memory_allocated (GB)", "total_memory_available (GB)"}
print("memory", *{memory <= entry.keys() for entry in trainer.state.log_history})
print("weight", model.classifier.weight.double().sum().item())
kind = type(getattr(trainer.optimizer, "optimizer", trainer.optimizer))
assert kind.__module__.startswith("hmp.compat.habana") and kind.__name__ == "FusedAdamW", kind
print("losses", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
if torch.distributed.is_initialized():
    torch.distributed.barrier()  # rank 0 may still write a checkpoint while rank 1 is here
print("checkpoint", sorted(entry.name for entry in __import__("pathlib").Path("out").iterdir() if entry.is_dir()))
"""

# The end of a script in several processes: a group of gloo's that dies may wait for its threads for ever (see leave() of ddp_run.py).
LAST = """\
import os, sys
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def real_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with optimum-habana and its transformers; skips where the package index has them not."""
    folder = tmp_path_factory.mktemp("optimum-habana")
    done = python("-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *REAL, cwd=folder)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install optimum-habana 1.5 here: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_package_runs_on_hmps_habana_frameworks(tmp_path: Path, real_packages: Path) -> None:
    (tmp_path / "guide.py").write_text(GUIDE.replace("OPTIONS", "use_hpu_graphs=True, gradient_checkpointing=True, "))
    done = python(*HABANA, "guide.py", cwd=tmp_path, before=real_packages)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "real\n" in done.stdout and "memory True\n" in done.stdout
    assert "checkpoint ['checkpoint-3', 'checkpoint-6'" in done.stdout
    assert "mark_step() does nothing without Habana's software" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_same_script_runs_on_the_stand_in_and_processes_train_as_one(tmp_path: Path, processes: int) -> None:
    script = GUIDE.replace("OPTIONS", "use_hpu_graphs=True, ")
    (tmp_path / "guide.py").write_text(script + (LAST if processes == 2 else ""))
    done = (two_ranks if processes == 2 else python)(*HABANA, "guide.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert said.count("stand-in") == said.count("checkpoint ['checkpoint-3', 'checkpoint-6']") == processes
    assert len({line for line in said if line.startswith("weight ")}) == 1
    assert sorted(line for line in said if line.startswith("memory ")) == ["memory False"] * (processes - 1) + ["memory True"]
    assert done.stderr.count("use_lazy_mode does nothing") == 1, "the main process speaks for all"
