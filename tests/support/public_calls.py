"""Calls of torch's public functions for networks and attention that op_db has no samples of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, bias, flex_attention, sdpa_kernel

MIXTURES: dict[str, tuple[torch.dtype, ...]] = {
    "float32": (torch.float32,),
    "bfloat16": (torch.bfloat16,),
    "float32 first": (torch.float32, torch.bfloat16),
    "bfloat16 first": (torch.bfloat16, torch.float32),
}


class Given:
    """Makes the tensors of a call, each with its own values: the first in the mixture's first dtype, the others in its last."""

    def __init__(self, mixture: str) -> None:
        self.dtypes, self.count = MIXTURES[mixture], 0

    def __call__(self, *shape: int) -> torch.Tensor:
        dtype = self.dtypes[0 if self.count == 0 else -1]
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        return torch.randn(*shape, generator=generator).to(dtype)

    def heads(self) -> torch.Tensor:
        return self(1, 2, 16, 8)

    def jagged(self) -> torch.Tensor:
        rows = self(8, 8)
        return nn.Parameter(torch.nested.nested_tensor([rows[:3], rows[3:]], layout=torch.jagged)).unflatten(-1, (2, 4)).transpose(1, 2)


def _scored(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * 2 + (i - j) / 4


def _math(t: Given) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(t.heads(), t.heads(), t.heads())


@functools.cache
def _attending(**options: Any) -> nn.MultiheadAttention:
    torch.default_generator.manual_seed(0)
    return nn.MultiheadAttention(8, 2, batch_first=True, **options)


def _modules(t: Given, train: bool = True, **options: Any) -> Any:
    module = _attending(**options).train(train)
    x = t(2, 4, 8)
    return module(x, x, x)


_samples = torch.full((1, 2, 2), 0.4)
_samples3 = torch.full((1, 2, 3), 0.4)
CALLS: dict[str, tuple[Callable[[Given], Any], ...]] = {
    "nn.functional.conv_tbc": (lambda t: F.conv_tbc(t(5, 1, 3), t(3, 3, 2), t(2)),),
    "nn.functional.fractional_max_pool2d_with_indices": (
        lambda t: F.fractional_max_pool2d_with_indices(t(1, 2, 6, 6), 2, output_size=3, _random_samples=_samples),
    ),
    "nn.functional.fractional_max_pool3d_with_indices": (
        lambda t: F.fractional_max_pool3d_with_indices(t(1, 2, 6, 6, 6), 2, output_size=3, _random_samples=_samples3),
    ),
    "nn.functional.dropout1d": (lambda t: F.dropout1d(t(2, 3, 4), 0.5, True), lambda t: F.dropout1d(t(2, 3, 4), 0.5, False)),
    "nn.functional.threshold_": (lambda t: F.threshold_(t(2, 3), 0.1, 20.0),),
    "nn.functional.relu_": (lambda t: F.relu_(t(2, 3)),),
    "nn.functional.leaky_relu_": (lambda t: F.leaky_relu_(t(2, 3)),),
    "nn.functional.rrelu_": (lambda t: F.rrelu_(t(2, 3)), lambda t: F.rrelu_(t(2, 3), training=True)),
    "nn.functional.gumbel_softmax": (lambda t: F.gumbel_softmax(t(2, 3)), lambda t: F.gumbel_softmax(t(2, 3), hard=True)),
    "nn.functional.native_channel_shuffle": (lambda t: F.native_channel_shuffle(t(1, 4, 2, 2), 2),),
    "nn.functional.upsample": (lambda t: F.upsample(t(1, 2, 3, 3), scale_factor=2, mode="bilinear"),),
    "nn.functional.affine_grid": (lambda t: F.affine_grid(t(1, 2, 3), (1, 1, 2, 2), align_corners=False),),
    "nn.functional.fold": (lambda t: F.fold(t(1, 8, 4), (3, 3), (2, 2)),),
    "nn.functional.grouped_mm": (lambda t: F.grouped_mm(t(2, 16, 16), t(2, 16, 16)),),
    "nn.attention.sdpa_kernel": (_math,),
    "nn.attention.flex_attention.flex_attention": (
        lambda t: flex_attention.flex_attention(t.heads(), t.heads(), t.heads()),
        lambda t: flex_attention.flex_attention(query=t.heads(), key=t.heads(), value=t.heads(), score_mod=_scored),
        lambda t: flex_attention.flex_attention(t(1, 4, 16, 8), t.heads(), t.heads(), enable_gqa=True, scale=0.3),
        lambda t: flex_attention.flex_attention(t.heads(), t.heads(), t.heads(), return_lse=True),
    ),
    "nn.attention.bias.causal_upper_left": (
        lambda t: F.scaled_dot_product_attention(t.heads(), t.heads(), t.heads(), attn_mask=bias.causal_upper_left(16, 16)),
        lambda t: F.scaled_dot_product_attention(t.heads(), t(1, 2, 4, 8), t(1, 2, 4, 8), bias.causal_upper_left(16, 4)),
    ),
    "nn.attention.bias.causal_lower_right": (
        lambda t: F.scaled_dot_product_attention(t.heads(), t.heads(), t.heads(), bias.causal_lower_right(16, 16)),
        lambda t: F.scaled_dot_product_attention(t(1, 2, 4, 8), t.heads(), t.heads(), attn_mask=bias.causal_lower_right(4, 16)),
    ),
    "nested.nested_tensor": (
        lambda t: torch.nested.nested_tensor([t(3, 2), t(2, 2)], layout=torch.jagged),
        lambda t: F.scaled_dot_product_attention(t.jagged(), t.jagged(), t.jagged()),
        lambda t: F.scaled_dot_product_attention(query=t.jagged(), key=t.jagged(), value=t.jagged(), is_causal=True),
        lambda t: F.linear(t.jagged().transpose(1, 2).flatten(-2), t(3, 8)),
        lambda t: torch.matmul(t.jagged(), t(4, 3)),
        lambda t: F.softmax(t.jagged(), -1),
        lambda t: F.layer_norm(t.jagged(), (4,), t(4), t(4)),
    ),
    "nested.to_padded_tensor": (lambda t: torch.nested.to_padded_tensor(t.jagged().transpose(1, 2).flatten(-2), 0.0),),
    "nn.functional.multi_head_attention_forward": (
        _modules,
        lambda t: _modules(t, train=False),
        lambda t: _modules(t, bias=False, add_bias_kv=True, add_zero_attn=True),
    ),
}
# Not here: torch.nn.attention.varlen, whose functions have kernels for CUDA alone.
