"""Scoped lines on a transformer, beside plain torch with explicit casts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

import hmp

LOW, WIDE = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def t5() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2, decoder_start_token_id=0,
        dropout_rate=0.1, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config)


@contextmanager
def by_hand(model: torch.nn.Module) -> Iterator[list[tuple[bool, torch.dtype]]]:
    """A stretch in which plain torch has softmax in float32 inside the decoder and in bfloat16 elsewhere; it notes each."""
    softmax, inside, notes = F.softmax, [False], []

    def cast(scores: torch.Tensor, **kwargs: int) -> torch.Tensor:
        result = softmax(scores.float() if inside[0] else scores.bfloat16(), **kwargs)
        notes.append((inside[0], result.dtype))
        return result.float()

    def entering(*_: object) -> None:
        inside[0] = True

    def leaving(*_: object) -> None:
        inside[0] = False

    hooks = model.decoder.register_forward_pre_hook(entering), model.decoder.register_forward_hook(leaving)
    F.softmax = cast
    try:
        yield notes
    finally:
        F.softmax = softmax
        for hook in hooks:
            hook.remove()


def test_scope_t5_has_one_softmax_in_the_decoder_and_another_in_the_encoder(t5: torch.nn.Module):
    ids = torch.randint(1, 40, (2, 5))

    def step(model: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        result = model(input_ids=ids, labels=ids)
        result.loss.backward()
        return [result.loss.detach(), result.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    with by_hand(t5) as notes:
        wanted = step(t5)
    assert set(notes) == {(True, WIDE), (False, LOW)} and len(notes) == 6
    policy = hmp.Policy("t5", bf16={"softmax"}, fp32={"softmax @ decoder.*", "dropout", "matmul", "linear"})
    hmp.apply(t5, policy)
    with hmp.record() as report:
        found = step(t5)
    hmp.remove(t5)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    rows = {(row.module.partition(".")[0], row.rule, row.source, row.compute) for row in report.rows if row.op == "softmax"}
    assert rows == {("encoder", "bf16", "softmax", "bfloat16"), ("decoder", "fp32", "softmax @ decoder.*", "float32")}
    with hmp.convert(policy=policy, model=t5):
        torch.testing.assert_close(step(t5), wanted, rtol=0, atol=0)
