"""What tests of products that compute in float32 (R11, "No instructions") share: the casts written out, and calls that keep much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hmp
from low_kernels_kit import in_float32
from oracle import BF16, F32, assert_identical, cast, flat
from trap_kit import policy

Call = Callable[..., Any]
# Every op that computes in float32 where a processor has no instructions for a low-precision dtype, as lists name it.
ALL_NAMES = """
    linear matmul mm bmm addmm addbmm baddbmm inner einsum tensordot chain_matmul linalg.multi_dot matrix_power cov corrcoef
    _addmm_activation bilinear scaled_dot_product_attention conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    conv_tbc convolution lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""".split()


def listed(low: torch.dtype = BF16) -> hmp.Policy:
    """A policy with every product on its BF16 list."""
    return policy(bf16=ALL_NAMES, dtype=low, name=f"products in {low}")


def by_hand(op: Call, low: torch.dtype = BF16) -> Call:
    """`op` on rounded inputs in float32, rounded; gradients are those of the inputs as they were given."""
    wide = in_float32(op)
    return lambda *args, **kwargs: wide(*cast(args, low), **cast(kwargs, low))


def random(*shape: int, dtype: torch.dtype = F32, grad: bool = True, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).mul(scale).to(dtype).requires_grad_(grad)


def gradients(end: torch.Tensor, of: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The gradients of a fixed combination of what `end` holds."""
    weights = torch.linspace(-1.0, 1.5, end.numel()).reshape(end.shape).to(end.dtype)
    return list(torch.autograd.grad(end, list(of), weights, **kwargs))


def all_same(found: Any, expected: Any) -> None:
    found, expected = flat(found), flat(expected)
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_identical(one, other, f"tensor {number}")


class Kernels(TorchDispatchMode):
    """The dtypes of the first tensor of every product that torch's kernels compute."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in ("mm", "addmm", "bmm", "convolution"):
            self.dtypes.add(next(a.dtype for a in args if isinstance(a, torch.Tensor)))
        return func(*args, **(kwargs or {}))


# --- calls that keep something for backward besides their inputs, or views of them


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, drop: float = 0.0) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=drop)


# looked up when they are called, as a program does
def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, w, b)


def convolution(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return F.conv2d(x, w, b)


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(3)
    return attention(q, k, v, 0.3)


def recurrent(kind: str, layers: int = 1) -> Call:
    """`f(x, *weights)`, what a recurrent layer of this kind returns, in training with dropout between layers."""

    def call(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(4)
        state = x.new_zeros(layers, x.shape[1], weights[1].shape[1])
        hx = (state, state) if kind == "lstm" else state
        return getattr(torch._VF, kind)(x, hx, list(weights), True, layers, 0.4, True, False, False)[0]

    return call


def weights_of(gates: int, width: int, layers: int, dtype: torch.dtype) -> list[torch.Tensor]:
    each = [(gates * width, width), (gates * width, width), (gates * width,), (gates * width,)]
    return [random(*shape, dtype=dtype, seed=i, scale=0.2) for i, shape in enumerate(each * layers)]


AGAIN: dict[str, tuple[Call, Callable[[torch.dtype], list[torch.Tensor]]]] = {
    "attention": (attention, lambda dtype: [random(1, 2, 80, 32, dtype=dtype, seed=i) for i in range(3)]),
    "attention with dropout": (dropped, lambda dtype: [random(1, 2, 80, 32, dtype=dtype, seed=i) for i in range(3)]),
    "gru": (recurrent("gru"), lambda dtype: [random(9, 8, 40, dtype=dtype), *weights_of(3, 40, 1, dtype)]),
    "lstm": (recurrent("lstm"), lambda dtype: [random(9, 8, 40, dtype=dtype), *weights_of(4, 40, 1, dtype)]),
    "lstm with dropout": (recurrent("lstm", 2), lambda dtype: [random(5, 8, 40, dtype=dtype), *weights_of(4, 40, 2, dtype)]),
    "rnn_tanh": (recurrent("rnn_tanh"), lambda dtype: [random(9, 8, 72, dtype=dtype), *weights_of(1, 72, 1, dtype)]),
    # twice and not three times: a sum of three low-precision gradients depends on their order
    "a query twice": (lambda q, v: attention(q, q, v), lambda dtype: [random(1, 2, 80, 32, dtype=dtype, seed=i) for i in range(2)]),
    "views of one tensor": (
        lambda x: attention(*x.view(1, 80, 3, 2, 32).permute(2, 0, 3, 1, 4)),
        lambda dtype: [random(1, 80, 192, dtype=dtype)],
    ),
    "chain": (lambda a, b: torch.linalg.multi_dot([a, b, a]), lambda dtype: [random(70, 72, dtype=dtype), random(72, 70, dtype=dtype)]),
    "linear": (linear, lambda dtype: [random(2, 33, 64, dtype=dtype), random(80, 64, dtype=dtype), random(80, dtype=dtype)]),
    "heads": (
        lambda q, k: torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)),
        lambda dtype: [random(1, 40, 4, 32, dtype=dtype, seed=i) for i in range(2)],
    ),
    "sliced": (lambda x, w: F.linear(x[..., :64], w), lambda dtype: [random(2, 33, 128, dtype=dtype), random(70, 64, dtype=dtype)]),
    "convolution": (convolution, lambda dtype: [random(2, 8, 17, 17, dtype=dtype), random(4, 8, 3, 3, dtype=dtype)]),
}


# The casts written out where there is more than one product to a call: views are not the product's, and each argument is cast by itself.
BY_HAND: dict[str, Call] = {
    "a query twice": lambda q, v: by_hand(attention)(q, q, v),
    "views of one tensor": lambda x: by_hand(attention)(*x.view(1, 80, 3, 2, 32).permute(2, 0, 3, 1, 4)),
    "chain": lambda a, b: by_hand(lambda *m: torch.linalg.multi_dot(m))(a, b, a),
    "heads": lambda q, k: by_hand(torch.matmul)(q.transpose(1, 2), k.permute(0, 2, 3, 1)),
    "sliced": lambda x, w: by_hand(F.linear)(x[..., :64], w),
}


def expected_of(name: str, args: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    end = end_of(name, args)
    return end, gradients(end, [a for a in args if a.requires_grad])


def end_of(name: str, args: list[torch.Tensor]) -> torch.Tensor:
    return (BY_HAND.get(name) or by_hand(AGAIN[name][0]))(*args)
