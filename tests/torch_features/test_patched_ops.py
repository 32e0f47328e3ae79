"""What stands at torch's places takes exactly the calls that torch's own functions take. What it casts, P1 asks, and under whom, P4."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy, same

BF16, F32 = torch.bfloat16, torch.float32
x, y, b = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
x3, y3, im, k = x[None], y[None], torch.randn(1, 2, 5, 5), torch.randn(4, 2, 3, 3)

CALLS = {
    "linear": lambda: F.linear(x, y),
    "linear(keywords)": lambda: F.linear(input=x, bias=b, weight=y),
    "linear(numpy's names)": lambda: F.linear(x=x, weight=y),
    "linear(a)": lambda: F.linear(a=x, weight=y, bias=None),
    "matmul(x1, x2)": lambda: torch.matmul(x1=x, x2=y),
    "matmul(out)": lambda: torch.matmul(x, y, out=torch.empty(3, 3)),
    "Tensor.matmul(x2)": lambda: x.matmul(x2=y),
    "@": lambda: x @ y,
    "__matmul__(other)": lambda: x.__matmul__(other=y),
    "mm(out_dtype)": lambda: torch.mm(x, mat2=y),
    "bmm": lambda: torch.bmm(x3, y3),
    "addmm": lambda: torch.addmm(b, x, y),
    "addmm(beta, alpha)": lambda: torch.addmm(b, x, y, beta=0.5, alpha=2),
    "addmm(alpha, keywords)": lambda: torch.addmm(input=b, mat1=x, mat2=y, alpha=2),
    "Tensor.addmm": lambda: b.addmm(x, y, beta=2),
    "baddbmm(alpha)": lambda: torch.baddbmm(x3, x3, y3, alpha=3),
    "conv2d": lambda: F.conv2d(im, k),
    "conv2d(stride)": lambda: F.conv2d(im, k, None, 2),
    "conv2d(padding by name)": lambda: F.conv2d(im, k, padding="same"),
    "conv2d(groups)": lambda: F.conv2d(im, k[:, :1], groups=2),
    "conv2d(everything)": lambda: F.conv2d(im, k, torch.ones(4), (1, 2), (1, 0), 1, 1),
    "conv_transpose2d": lambda: F.conv_transpose2d(im, k[:2], None, 2, 1, output_padding=1),
    "layer_norm": lambda: torch.layer_norm(x, (3,)),
    "layer_norm(keywords)": lambda: torch.layer_norm(x, normalized_shape=(3,), bias=b, weight=b, eps=1e-3),
    "F.layer_norm": lambda: F.layer_norm(x, [3], eps=1e-2),
    "group_norm": lambda: torch.group_norm(im, 2, eps=1e-3),
    "batch_norm": lambda: F.batch_norm(im, torch.zeros(2), torch.ones(2), training=True),
    "softmax(dim)": lambda: torch.softmax(x, dim=0),
    "softmax(axis)": lambda: torch.softmax(x, axis=0),
    "softmax(dtype)": lambda: torch.softmax(x, 0, torch.float64),
    "Tensor.softmax(dtype)": lambda: x.softmax(dim=0, dtype=torch.float64),
    "F.softmax": lambda: F.softmax(x, dim=-1),
    "log_softmax": lambda: x.log_softmax(1),
    "add": lambda: torch.add(x, y),
    "add(alpha)": lambda: torch.add(x, y, alpha=3),
    "add(number)": lambda: torch.add(x, 2),
    "add(out)": lambda: torch.add(x, y, out=torch.empty(3, 3)),
    "Tensor.add(other, alpha)": lambda: x.add(other=y, alpha=2),
    "number + x": lambda: 2.5 + x,
    "x - True": lambda: x * True,
    "mul(x2)": lambda: torch.mul(x, x2=y),
    "mul(number first)": lambda: torch.mul(2, x),
    "div(rounding_mode)": lambda: torch.div(x, y, rounding_mode="floor"),
    "Tensor.div(rounding_mode)": lambda: x.div(y, rounding_mode="trunc"),
    "cat(axis)": lambda: torch.cat([x, y], axis=1),
    "cat(dim)": lambda: torch.cat((x, y), 1),
    "cat(keywords)": lambda: torch.cat(dim=-1, tensors=[x, y]),
    "stack": lambda: torch.stack([x, y], dim=1),
    "gelu": lambda: F.gelu(x),
    "gelu(approximate)": lambda: F.gelu(x, approximate="tanh"),
    "relu": lambda: torch.relu(input=x),
    "t": lambda: x.t() + 0,
    "transpose": lambda: torch.transpose(x3, 0, dim1=1) + 0,
    "unsqueeze(axis)": lambda: x.unsqueeze(axis=1) + 0,
    "mean": lambda: torch.mean(x),
    "mean(dim)": lambda: x.mean(0),
    "mean(axis)": lambda: torch.mean(x, axis=1),
    "mean(axis, keepdims)": lambda: torch.mean(x, axis=1, keepdims=True),
    "mean(no dim)": lambda: torch.mean(x, dim=None, keepdim=True),
    "mean(dtype)": lambda: x.mean(dtype=torch.float64),
    "mean(dim, dtype)": lambda: x.mean(1, True, dtype=torch.float64),
    "sum(dims)": lambda: x.sum((0, 1)),
    "sum(keepdim)": lambda: x.sum(-1, keepdim=True),
    "sum(out)": lambda: torch.sum(x, 0, out=torch.empty(3)),
    "sdpa": lambda: F.scaled_dot_product_attention(x3, y3, x3),
    "sdpa(keywords)": lambda: F.scaled_dot_product_attention(x3, y3, value=x3, attn_mask=torch.eye(3).bool(), scale=0.3, dropout_p=0.0),
    "sdpa(is_causal)": lambda: F.scaled_dot_product_attention(x3, y3, x3, None, 0.0, True),
    "dropout": lambda: torch.dropout(x, 0.5, False),
    "masked_fill": lambda: x.masked_fill(mask=x > 0, value=2),
    "masked_fill(function)": lambda: torch.masked_fill(x, x > 0, torch.tensor(3.0)),
    "add_(alpha)": lambda: x.clone().add_(y, alpha=2),
    "x[0] = 1": lambda: _written(),
    "x += 1": lambda: _added(),
}
REFUSED = {
    "too many": lambda: torch.matmul(x, y, x),
    "too many for a method": lambda: x.matmul(y, x),
    "no such keyword": lambda: torch.matmul(x, y, nonsense=1),
    "nothing": lambda: torch.matmul(),
    "one missing": lambda: F.linear(x),
    "a list for a tensor": lambda: torch.matmul([1.0], y),
    "a number for a tensor": lambda: F.linear(1.0, y),
    "None for a tensor": lambda: torch.bmm(None, y3),
    "wrong shapes": lambda: torch.mm(x, torch.ones(2, 2)),
    "no dim": lambda: x.softmax(),
    "keepdim alone": lambda: torch.mean(x, keepdim=True),
    "a bad mode": lambda: torch.div(x, y, rounding_mode="up"),
}


def _written() -> torch.Tensor:
    z = x.clone()
    z[0] = 1
    z[:, 1] = b
    return z


def _added() -> torch.Tensor:
    z = x.clone()
    z += 1
    z *= y
    return z


# with the op on the FP32 list there is nothing to cast; on the BF16 list and off everything else is asked
LISTABLE = """linear matmul mm bmm addmm baddbmm conv2d conv_transpose2d layer_norm group_norm batch_norm softmax log_softmax add mul div
cat stack gelu relu t transpose unsqueeze mean sum scaled_dot_product_attention dropout masked_fill""".split()
FORCES = {
    "listed, nothing to cast": lambda: hmp.convert(policy=policy(fp32=LISTABLE)),
    "nothing listed": lambda: hmp.convert(policy=policy(bf16=["erfinv"])),
    "torch-cpu, off": lambda: _Off("torch-cpu"),
    "habana, off": lambda: _Off("habana"),
    "another region's": lambda: hmp.casts(policy(fp32=LISTABLE)),
}


class _Off:
    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        hmp.convert(policy=self.name)
        self.off = hmp.disable_casts()
        self.off.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self.off.__exit__(*exc_info)
        hmp.revert()


@pytest.mark.parametrize("force", FORCES)
def test_patched_ops_take_every_call_that_torch_takes(force: str) -> None:
    expected = {name: call() for name, call in CALLS.items()}
    with FORCES[force]():
        for name, call in CALLS.items():
            same(call(), expected[name])


@pytest.mark.parametrize("force", FORCES)
def test_patched_ops_refuse_what_torch_refuses(force: str) -> None:
    for call in REFUSED.values():
        with pytest.raises((TypeError, RuntimeError)):
            call()
    with FORCES[force]():
        for call in REFUSED.values():
            with pytest.raises((TypeError, RuntimeError)):
                call()


class Wrapper(torch.Tensor):
    """A tensor that runs Python of its own for every op, and notes what it computes in."""

    notes: ClassVar[list[torch.dtype]] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        scaled = torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))  # user code would see a cast here
        cls.notes.append(scaled.dtype)
        return func(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))


@pytest.mark.parametrize("when", ["before", "after"])
def test_r8_what_a_tensor_subclass_does_inside_is_not_cast(when: str) -> None:
    cls = Wrapper
    with hmp.convert(policy=policy(bf16=["linear", "matmul"])):
        if when == "after":
            cls = type("Later", (Wrapper,), {"__torch_dispatch__": classmethod(Wrapper.__torch_dispatch__.__func__), "notes": []})
        cls.notes = []
        torch.matmul(cls(x.to(BF16)), cls(y.to(BF16)))  # nothing to cast
        torch.matmul(cls(x), cls(y))
        torch.erf(cls(x))  # unlisted
        assert F.linear(x, y).dtype is BF16
    assert cls.notes
    assert set(cls.notes) == {F32}
