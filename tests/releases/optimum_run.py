"""What .ci/releases runs with each release of transformers: the guide's example, a training that is the same on all, and the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import accelerate
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification

import hmp
from hmp.compat import habana

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("optimum_configuration", "optimum_training", "optimum_scripts", "transformers")
STEPS, RATE = 4, 1e-3


def model() -> torch.nn.Module:
    """A BERT whose weights no release draws, and that draws nothing."""
    made = torch.Generator().manual_seed(0)
    bert = BertForSequenceClassification(
        BertConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, attn_implementation="eager",
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in sorted(bert.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=made) * 0.1 + ("LayerNorm.weight" in name))
    return bert


class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """In one order: how rows are drawn is each release's own."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        made = torch.Generator().manual_seed(1)
        for i in range(4 * STEPS):
            yield {"input_ids": torch.randint(0, 99, (8,), generator=made), "labels": torch.tensor(i % 2)}


def by_the_stand_in(folder: str, bert: Any, lists: dict[str, Any]) -> list[float]:
    """The losses of GaudiTrainer's steps."""
    from optimum.habana import GaudiConfig, GaudiTrainer, GaudiTrainingArguments

    arguments = GaudiTrainingArguments(
        folder, use_habana=True, use_lazy_mode=True, per_device_train_batch_size=4, max_steps=STEPS, learning_rate=RATE, report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    found: list[float] = []
    trainer = GaudiTrainer(
        bert, GaudiConfig(use_habana_mixed_precision=True, use_fused_adam=True, **lists), arguments, train_dataset=Rows()
    )
    bert.register_forward_hook(lambda module, args, out: found.append(out.loss.item()))
    trainer.train()
    return found


def by_torch(bert: torch.nn.Module) -> list[float]:
    """Those of the same training, written with torch alone."""
    optimizer = torch.optim.AdamW(bert.parameters(), lr=RATE, eps=1e-6, weight_decay=0.0, fused=True)
    rows = list(Rows())
    found = []
    for step in range(STEPS):
        batch = {name: torch.stack([row[name] for row in rows[4 * step : 4 * step + 4]]) for name in rows[0]}
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        with torch.autocast("cpu"):
            loss = bert(**batch).loss
        loss.float().backward()
        torch.nn.utils.clip_grad_norm_(bert.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def losses(folder: str) -> str:
    """The losses under the lists of torch.autocast, which must be those of torch.autocast."""
    own = hmp.Policy.load("torch-cpu")
    mine, autocast = model(), model()
    found = by_the_stand_in(folder, mine, {"hmp_bf16_ops": own.entries("bf16"), "hmp_fp32_ops": own.entries("fp32")})
    wanted = by_torch(autocast)
    if found != wanted or not all(torch.equal(*pair) for pair in zip(mine.parameters(), autocast.parameters(), strict=True)):
        return f"fails: {found}, torch.autocast {wanted}"
    return ", ".join(f"{each:.6f}" for each in found)


def dtypes(folder: str) -> str:
    """What comes out of some modules under BERT's lists."""
    bert: Any = model()
    seen: dict[str, set[str]] = {}
    embeddings = bert.bert.embeddings
    places = {"embedding": embeddings.word_embeddings, "linear": bert.bert.pooler.dense, "layer_norm": embeddings.LayerNorm}
    for name, module in places.items():
        module.register_forward_hook(lambda module, args, out, name=name: seen.setdefault(name, set()).add(str(out.dtype)[6:]))
    by_the_stand_in(folder, bert, {})
    seen["parameters"] = {str(each.dtype)[6:] for each in bert.parameters()}
    return ", ".join(f"{name} {'/'.join(sorted(kinds))}" for name, kinds in seen.items())


def guide(folder: str) -> str:
    """Whether the example of the page runs as it stands there."""
    page = (ROOT / "docs" / "pages" / "migrate" / "optimum-on-gaudi.md").read_text(encoding="utf-8")
    script = page.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    return "runs" if done.returncode == 0 else f"fails: {done.stderr.strip().splitlines()[-1]}"


def tests() -> str:
    """What pytest says of the tests of Optimum's and transformers' part."""
    files = [f"tests/compat/test_compat_{name}.py" for name in TESTS]
    chosen = ("-m", "not nightly", "-k", "not real_package")  # those take a release of their own
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
        return "fails: " + ", ".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    return done.stdout.strip().splitlines()[-1].rpartition(" in ")[0]


def main() -> None:
    """Prints what was found as one line of JSON."""
    found = {"transformers": transformers.__version__, "accelerate": accelerate.__version__, "torch": torch.__version__}
    with TemporaryDirectory() as folder:
        found["the guide's example"] = guide(folder)
        with habana.install("cpu"):
            found["losses"] = losses(folder)
            found["dtypes"] = dtypes(folder)
    print(json.dumps(found | {"tests": tests()}))


if __name__ == "__main__":
    main()
