"""Fine-tunings in the style of Habana's scripts, made small: with Habana's own O1 lists their losses are those of float32, nearly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_kit import HABANA, python
from published import LISTS, needs_corpus

pytestmark = [pytest.mark.slow, needs_corpus]

# As its paraphrasing: a data loader that is imported and not used, ranks from distributed_utils, integers of 32 bits, clipped gradients.
SEQ2SEQ = """\
import json, sys
import habana_dataloader
import torch
from transformers import BartConfig, BartForConditionalGeneration
import habana_frameworks.torch.core as htcore
from habana_frameworks.torch.hpex import hmp
from habana_frameworks.torch.hpex.normalization import FusedClipNorm
from habana_frameworks.torch.hpex.optimizers import FusedAdamW
from habana_frameworks.torch.utils.distributed_utils import initialize_distributed_hpu

assert initialize_distributed_hpu() == (1, 0, -1)
device = torch.device("hpu")
config = BartConfig(vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                    encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16, dropout=0.0)

def train():
    torch.manual_seed(0)
    model = BartForConditionalGeneration(config).to(device).train()
    optimizer, clip = FusedAdamW(model.parameters(), lr=1e-2, eps=1e-8), FusedClipNorm(model.parameters(), 1.0)
    ids = torch.randint(4, 32, (8, 8), generator=torch.Generator().manual_seed(1)).to(torch.int32).to(device)
    losses = []
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        htcore.mark_step()
        with hmp.disable_casts():
            clip.clip_norm(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        htcore.mark_step()
        losses.append(loss.item())
    return losses

found = {"float32": train()}
hmp.convert(opt_level="O1", bf16_file_path=sys.argv[1], fp32_file_path=sys.argv[2], isVerbose=False)
found["bf16"] = train()
print(json.dumps(found))
"""

# A training whose step is captured after a warm-up, as Habana's documentation of HPU graphs has it.
CAPTURED = """\
import json, sys
import torch
from torch import nn
import habana_frameworks.torch as ht
from habana_frameworks.torch.hpex import hmp
from habana_frameworks.torch.hpex.optimizers import FusedAdamW

generator = torch.Generator().manual_seed(1)
batches = [(torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)) for _ in range(8)]

def train(captured):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to("hpu")
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    x, y = batches[0][0].to("hpu").clone(), batches[0][1].to("hpu").clone()

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        with hmp.disable_casts():
            optimizer.step()
        return loss

    losses = []
    stream = ht.hpu.Stream()
    with ht.hpu.stream(stream):
        for images, labels in batches[:2]:
            x.copy_(images), y.copy_(labels)
            losses.append(step().item())
    if captured:
        graph = ht.hpu.HPUGraph()
        x.copy_(batches[2][0]), y.copy_(batches[2][1])
        with ht.hpu.graph(graph):
            loss = step()
        losses.append(loss.item())
    for images, labels in batches[3 if captured else 2:]:
        x.copy_(images), y.copy_(labels)
        if captured:
            graph.replay()
        else:
            loss = step()
        losses.append(loss.item())
    return losses

found = {"float32": train(False), "float32 captured": train(True)}
hmp.convert(opt_level="O1", bf16_file_path=sys.argv[1], fp32_file_path=sys.argv[2], isVerbose=False)
found |= {"bf16": train(False), "bf16 captured": train(True)}
print(json.dumps(found))
"""


def run(folder: Path, script: str, name: str) -> dict[str, list[float]]:
    """The losses that the script prints, by precision, with the corpus's lists of that name."""
    (folder / "train.py").write_text(script)
    lists = (next((LISTS / name).glob(f"ops_{kind}_*")) for kind in ("bf16", "fp32"))
    done = python(*HABANA, "train.py", *lists, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_sequence_to_sequence_model_that_asks_distributed_utils_for_its_rank(tmp_path: Path) -> None:
    found = run(tmp_path, SEQ2SEQ, "roberta")
    assert found["bf16"] == pytest.approx(found["float32"], rel=2**-6) and found["bf16"] != found["float32"]
    assert found["bf16"][-1] < 0.9 * found["bf16"][0]


def test_a_captured_step_trains_as_the_step_itself(tmp_path: Path) -> None:
    found = run(tmp_path, CAPTURED, "distilbert")
    assert found["float32 captured"] == found["float32"] and found["bf16 captured"] == found["bf16"]
    assert found["bf16"] == pytest.approx(found["float32"], rel=2**-6) and found["bf16"] != found["float32"]
