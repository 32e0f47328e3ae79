"""Ops and the leaves that they are called with, looked up at the call: hmp does not reach a function that was taken before it was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from device_kit import tensor

Call = Callable[..., Any]
Case = tuple[Call, Callable[[], list[Any]]]


def _of(*shapes: tuple[int, ...], grad: bool = True, positive: bool = False) -> Callable[[], list[Any]]:
    """The same leaves at each call."""

    def make() -> list[Any]:
        found = [tensor(*shape, seed=number) for number, shape in enumerate(shapes)]
        return [(t.abs() + 0.25 if positive else t).requires_grad_(grad) for t in found]

    return make


OPS: dict[str, Case] = {
    "matmul": (lambda a, b: torch.matmul(a, b), _of((4, 8), (8, 6))),
    "mm": (lambda a, b: a.mm(b), _of((4, 8), (8, 6))),
    "bmm": (lambda a, b: torch.bmm(a, b), _of((2, 4, 8), (2, 8, 6))),
    "mv": (lambda a, b: torch.mv(a, b), _of((4, 8), (8,))),
    "dot": (lambda a, b: torch.dot(a, b), _of((8,), (8,))),
    "addmm": (lambda a, b, c: torch.addmm(a, b, c), _of((4, 6), (4, 8), (8, 6))),
    "baddbmm": (lambda a, b, c: torch.baddbmm(a, b, c), _of((2, 4, 6), (2, 4, 8), (2, 8, 6))),
    "linear": (lambda a, b, c: F.linear(a, b, c), _of((4, 8), (6, 8), (6,))),
    "bilinear": (lambda a, b, c: F.bilinear(a, b, c), _of((4, 8), (4, 6), (5, 8, 6))),
    "conv1d": (lambda a, b, c: F.conv1d(a, b, c), _of((2, 4, 9), (6, 4, 3), (6,))),
    "conv2d": (lambda a, b, c: F.conv2d(a, b, c, padding=1), _of((2, 4, 6, 6), (6, 4, 3, 3), (6,))),
    "conv3d": (lambda a, b: F.conv3d(a, b), _of((1, 2, 4, 4, 4), (3, 2, 2, 2, 2))),
    "conv_transpose2d": (lambda a, b: F.conv_transpose2d(a, b), _of((2, 4, 5, 5), (4, 6, 3, 3))),
    "scaled_dot_product_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), _of((2, 2, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16))
    ),
    "add": (lambda a, b: a + b, _of((4, 8), (8,))),
    "mul": (lambda a, b: a * b, _of((4, 8), (4, 1))),
    "sub": (lambda a, b: a - b, _of((4, 8), (4, 8))),
    "div": (lambda a, b: a / b, _of((4, 8), (4, 8), positive=True)),
    "where": (lambda a, b: torch.where(a > b, a, b), _of((4, 8), (4, 8))),
    "maximum": (lambda a, b: torch.maximum(a, b), _of((4, 8), (4, 8))),
    "clamp_min": (lambda a, b: a.clamp_min(b), _of((4, 8), (4, 8))),
    "remainder": (lambda a, b: torch.remainder(a, b), _of((4, 8), (4, 8), positive=True)),
    "cat": (lambda a, b: torch.cat([a, b]), _of((2, 8), (3, 8))),
    "stack": (lambda a, b: torch.stack([a, b]), _of((2, 8), (2, 8))),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=0.5), _of((4, 8), (4, 8), (4, 8))),
    "lerp": (lambda a, b, c: torch.lerp(a, b, c), _of((4, 8), (4, 8), (4, 8))),
    "softmax": (lambda a: torch.softmax(a, -1), _of((4, 8))),
    "log_softmax": (lambda a: a.log_softmax(-1), _of((4, 8))),
    "exp": (lambda a: torch.exp(a), _of((4, 8))),
    "log": (lambda a: torch.log(a), _of((4, 8), positive=True)),
    "pow": (lambda a: a**2, _of((4, 8))),
    "rsqrt": (lambda a: torch.rsqrt(a), _of((4, 8), positive=True)),
    "sum": (lambda a: a.sum(-1), _of((4, 8))),
    "mean": (lambda a: torch.mean(a), _of((4, 8))),
    "cumsum": (lambda a: torch.cumsum(a, 0), _of((4, 8))),
    "norm": (lambda a: torch.norm(a), _of((4, 8))),
    "gelu": (lambda a: F.gelu(a), _of((4, 8))),
    "relu": (lambda a: torch.relu(a), _of((4, 8))),
    "silu": (lambda a: F.silu(a), _of((4, 8))),
    "tanh": (lambda a: torch.tanh(a), _of((4, 8))),
    "leaky_relu": (lambda a: F.leaky_relu(a), _of((4, 8))),
    "max_pool2d": (lambda a: F.max_pool2d(a, 2), _of((2, 3, 6, 6))),
    "avg_pool2d": (lambda a: F.avg_pool2d(a, 2), _of((2, 3, 6, 6))),
    "mse_loss": (lambda a, b: F.mse_loss(a, b), _of((4, 8), (4, 8))),
    "l1_loss": (lambda a, b: F.l1_loss(a, b), _of((4, 8), (4, 8))),
    "smooth_l1_loss": (lambda a, b: F.smooth_l1_loss(a, b), _of((4, 8), (4, 8))),
    "cross_entropy": (lambda a: F.cross_entropy(a, torch.arange(4, device=a.device)), _of((4, 8))),
    "binary_cross_entropy_with_logits": (
        lambda a, b: F.binary_cross_entropy_with_logits(a, b), lambda: [*_of((4, 8))(), tensor(4, 8, seed=9).sigmoid()]
    ),
    "cosine_similarity": (lambda a, b: F.cosine_similarity(a, b), _of((4, 8), (4, 8))),
    "cdist": (lambda a, b: torch.cdist(a, b), _of((4, 8), (5, 8))),
}  # fmt: skip
