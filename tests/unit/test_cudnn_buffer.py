"""Weights of recurrent layers come to cuDNN's function as torch's modules hand them over. tests/device/on_rules.py runs it on CUDA.

No public call reaches it where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hmp
from hmp.core import torch_private
from hmp.core.rules import special
from trap_kit import policy

LAYERS = {
    "LSTM": lambda: torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "LSTM, projected": lambda: torch.nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "GRU without biases": lambda: torch.nn.GRU(3, 4, bias=False),
    "RNN": lambda: torch.nn.RNN(3, 4, nonlinearity="relu"),
}


@pytest.mark.native_kernels
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_cudnn_is_asked_as_the_module_asks_it(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a function that lays the weights out as cuDNN's does, where there is no GPU."""
    layer = LAYERS[name]()
    asked: list[Any] = []

    def flatten(weights: list[torch.Tensor], *how: Any) -> None:
        asked.append((len(weights), *how))
        buffer, at = torch.cat([each.reshape(-1) for each in weights]), 0
        for each in weights:
            each.set_(buffer[at : at + each.numel()].view_as(each))
            at += each.numel()

    monkeypatch.setattr(torch_private, "flatten_cudnn_weights", flatten)
    monkeypatch.setattr(special, "_are_for_cudnn", lambda weights: weights[0].dtype is torch.bfloat16)
    x = torch.randn(5, 2, 3).transpose(0, 1) if layer.batch_first else torch.randn(5, 2, 3)
    batch = torch.nn.utils.rnn.pack_padded_sequence(x, [5, 3], layer.batch_first) if packed else x
    low = {n: p.detach().bfloat16().requires_grad_() for n, p in layer.named_parameters()}
    want = torch.func.functional_call(layer, low, (batch.to(torch.bfloat16),))[0]
    with hmp.convert(policy=policy(bf16=["lstm", "gru", "rnn_relu"])):
        got = layer(batch)[0]
    got, want = (got.data, want.data) if packed else (got, want)
    assert torch.equal(got, want)
    got.float().sum().backward()
    want.float().sum().backward()
    for each, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, low[each].grad.float(), rtol=1e-2, atol=1e-2)
    of_a_layer = (4 if layer.bias else 2) + (layer.proj_size > 0)
    mode = {"LSTM": 2, "GRU": 3, "RNN_RELU": 0}[layer.mode]
    ways = layer.num_layers * (2 if layer.bidirectional else 1)
    how = (of_a_layer, 3, mode, 4, layer.proj_size, layer.num_layers, layer.batch_first and not packed, layer.bidirectional)
    assert asked == [(of_a_layer * ways, *how)]
