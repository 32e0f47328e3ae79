"""compare() says what a policy does to the tokens' log-probabilities: against plain torch with explicit casts, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import hmp

SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64
}  # fmt: skip
LINEAR = hmp.Policy("linear", bf16=frozenset({"linear"}))
SHIFTED = "labels (shifted by one position)"


class Bigrams(nn.Module):
    """A language model that knows the last token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        nn.init.normal_(self.head.weight)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.table(input_ids))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}


def ids(rows: int = 3, places: int = 9) -> Tensor:
    return torch.randint(1, 64, (rows, places), generator=torch.Generator().manual_seed(1))


def test_the_figures_are_those_of_explicit_casts_in_float64() -> None:
    model, labels = Bigrams(), ids()
    labels[0, :4] = -100
    with torch.no_grad():
        found = hmp.compare(model, (ids(), labels), LINEAR, shift=True).tokens
        hidden = model.table(ids())
        wide = F.linear(hidden, model.head.weight, model.head.bias).double().log_softmax(-1)
        low = F.linear(hidden.bfloat16(), model.head.weight.bfloat16(), model.head.bias.bfloat16()).double().log_softmax(-1)
    pairs = [(row, place, int(labels[row, place + 1])) for row in range(3) for place in range(8) if labels[row, place + 1] >= 0]
    errors = torch.stack([(low - wide)[pair] for pair in pairs])
    divergences = torch.stack([F.kl_div(low[row, place], wide[row, place], reduction="sum", log_target=True) for row, place, _ in pairs])
    assert found is not None
    assert (found.of, found.tokens) == (SHIFTED, len(pairs))
    assert found.reference == pytest.approx(float(torch.stack([wide[pair] for pair in pairs]).mean()))
    expected = (errors.abs().mean(), errors.abs().max(), divergences.mean(), divergences.max())
    assert (found.error_mean, found.error_max, found.kl_mean, found.kl_max) == pytest.approx(list(map(float, expected)))
    assert found.error_mean > 1e-3 and 0 < found.kl_mean < found.error_mean  # low precision shows


SEQ2SEQ = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
MODELS = {
    "causal": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "seq2seq": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**SEQ2SEQ)),
}


@pytest.mark.parametrize(("kind", "of"), [("causal", SHIFTED), ("masked", "labels"), ("seq2seq", "labels")])
def test_the_tokens_are_those_of_the_models_own_loss_without_padding(kind: str, of: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    mask, labels = torch.ones(3, 9, dtype=torch.int64), ids()
    mask[1, 6:], mask[2, :2], labels[0, :4] = 0, 0, -100
    batch = {"input_ids": ids(), "attention_mask": mask, "labels": labels}
    counted = labels.clone()
    if kind != "seq2seq":  # whose mask is the encoder's
        counted[mask == 0] = -100
    if kind == "causal":
        counted[2, 2] = -100  # what a padding token predicts
    with torch.no_grad():
        found = hmp.compare(model, batch, LINEAR, shift=kind == "causal").tokens
        loss = float(model(**(batch | {"labels": counted})).loss)
    assert found is not None
    assert (found.of, found.tokens) == (of, int((counted if kind != "causal" else counted[:, 1:]).ge(0).sum()))
    assert found.reference == pytest.approx(-loss, rel=1e-5)


def test_without_labels_float32s_likeliest_tokens_count() -> None:
    with torch.no_grad():
        found = hmp.compare(Bigrams(), ids(), LINEAR).tokens
        assert found == hmp.compare(Bigrams(), ids(), LINEAR, shift=True).tokens  # of labels, and there are none
        likeliest = Bigrams()(ids())["logits"].double().log_softmax(-1).amax(-1).mean()
    assert found is not None and (found.of, found.tokens) == ("likeliest tokens", 27)
    assert found.reference == pytest.approx(float(likeliest))


class Classes(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)}


def test_an_output_without_a_vector_for_each_position_has_no_tokens() -> None:
    with torch.no_grad():
        assert hmp.compare(Classes(8, 3), {"x": torch.randn(4, 8), "labels": torch.tensor([0, 1, 2, 1])}, LINEAR).tokens is None
        assert hmp.compare(nn.Linear(8, 3), torch.randn(4, 2, 8), LINEAR).tokens is None
        # labels that are no tokens of the vocabulary
        found = hmp.compare(Classes(8, 3), {"x": torch.randn(4, 2, 8), "labels": torch.full((4, 2), 5)}, LINEAR).tokens
        assert found is not None and found.of == "likeliest tokens"
