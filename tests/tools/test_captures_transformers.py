"""One checkpoint of transformers in two programs: eager and SDPA attention, compiled and not, a batch of one and of eight with padding.
Distances are those of the logits as transformers returns them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hmp

pytestmark = pytest.mark.slow
LENGTHS = (20, 31, 12, 17, 24, 8, 32, 5)


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    return [torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


def checkpoint(attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).eval().to(dtype)


def run(path: Path, model: Any, **batch: torch.Tensor) -> torch.Tensor:
    with hmp.capture(path, model), torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    return logits


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_and_sdpa_attention_part_in_the_first_attention(dtype: torch.dtype, prompts: Any, tmp_path: Path) -> None:
    ids = prompts[3][None]
    a = run(tmp_path / "a", checkpoint("eager", dtype), input_ids=ids)
    b = run(tmp_path / "b", checkpoint("sdpa", dtype), input_ids=ids)
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    assert found.first is not None and found.first.module == "model.layers.0.self_attn.o_proj"
    before = [gap.module for gap in found.gaps[: found.gaps.index(found.first)]]
    assert before[-3:] == [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    assert found.last is not None and found.last.relative == pytest.approx(relative(a, b), rel=1e-4)
    layers = [gap.relative for gap in found.layers()["model.layers.*"]]
    assert len(layers) == 3 and layers == sorted(layers)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_of_one_beside_its_row_of_eight_with_padding(side: str, prompts: Any, tmp_path: Path) -> None:
    ids, mask = torch.zeros(8, 32, dtype=torch.long), torch.zeros(8, 32, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        where = slice(32 - len(prompt), 32) if side == "left" else slice(0, len(prompt))
        ids[row, where], mask[row, where] = prompt, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model = checkpoint()
    one = run(tmp_path / "one", model, input_ids=prompts[3][None])
    eight = run(tmp_path / "eight", model, input_ids=ids, attention_mask=mask, position_ids=positions)
    found = hmp.compare_captures(tmp_path / "one", tmp_path / "eight")
    assert "row 0 beside row 3 " in found.notes[0] and "17 places" in found.notes[0]
    assert found.last is not None and found.last.relative == pytest.approx(relative(one[0], eight[3][mask[3] > 0]), rel=1e-4, abs=1e-9)
    assert max(gap.relative for gap in found.gaps if gap.relative is not None) < 1e-6
    assert [gap.named for gap in found.gaps if gap.relative is None] == []
    if side == "left":  # places that are counted from the padding are other ones
        run(tmp_path / "eight", model, input_ids=ids, attention_mask=mask)
        wrong = hmp.compare_captures(tmp_path / "one", tmp_path / "eight")
        assert wrong.first is not None and wrong.first.module == "model.rotary_emb" and wrong.first.relative > 0.1
