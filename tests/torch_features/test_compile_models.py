"""Whole models under torch.compile(fullgraph=True): dtypes and values of eager hmp, forward and backward."""

from __future__ import annotations

import pytest
import torch

import hmp

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **quiet))


def encoder() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def convolutional() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 4),
    )


TOKENS = {"input_ids": torch.arange(16).reshape(2, 8)}
MODELS = {
    "BERT": (bert, TOKENS),
    "TransformerEncoder": (encoder, {"src": torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32)}),
    "convolutional": (convolutional, {"input": torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)}),
}


def run(model: torch.nn.Module, call, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and every gradient in a row."""
    model.zero_grad()
    out = call(**inputs)
    out = getattr(out, "logits", out)
    out.float().pow(2).mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check(name: str, backend: str, policy: str, tolerance: float) -> None:
    make, inputs = MODELS[name]
    model = make()
    hmp.convert(policy=policy)
    expected, gradient = run(model, model, inputs)
    found, found_gradient = run(model, torch.compile(model, backend=backend, fullgraph=True), inputs)
    assert found.dtype is expected.dtype
    assert (found.float() - expected.float()).norm() <= tolerance * expected.float().norm()
    assert (found_gradient - gradient).norm() <= tolerance * gradient.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "policy"),
    [
        ("BERT", "eager", "habana"), ("convolutional", "aot_eager", "torch-cpu"), ("TransformerEncoder", "eager", "habana-o2"),
    ],
)  # fmt: skip
def test_every_compiled_model_computes_what_eager_does(name, backend, policy):
    check(name, backend, policy, 1e-2)
