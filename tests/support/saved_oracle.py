"""What packing is compared with: quantisers written by hand, ops whose backward gets quantised tensors, and a count of bytes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torch_has import SAVED_TENSORS_HOOKS

Tensor = torch.Tensor
BF16 = torch.bfloat16
aten = torch.ops.aten
packs = pytest.mark.skipif(not SAVED_TENSORS_HOOKS, reason="this torch packs nothing, which is an error that says so")


def block_of(row: int) -> int:
    """How many elements of a row share a scale: all, or the most up to 128 that fill it."""
    return row if row <= 128 else next(block for block in range(128, 63, -1) if row % block == 0)


def blockwise(tensor: Tensor, quantise: Callable[[Tensor], Tensor], block: int) -> Tensor:
    """`quantise` of each block in the order of memory."""
    flat = tensor.detach().contiguous().view(-1, block).double()
    return torch.stack([quantise(each) for each in flat]).to(tensor.dtype).view(tensor.shape)


def fp8(block: Tensor) -> Tensor:
    """e4m3 with the least power of two as scale by which the block's numbers are at most 448."""
    most = float(block.abs().max())
    scale = 2.0 ** math.ceil(math.log2(most / 448)) if most else 1.0
    return (block / scale).float().to(torch.float8_e4m3fn).double() * scale


def bf16(block: Tensor) -> Tensor:
    return block.to(BF16).double()


def quantised(tensor: Tensor, recipe: str, block: int = 0) -> Tensor:
    """What backward is to get in the place of a tensor, whose blocks are those of its rows unless their length is given."""
    block = block or block_of(tensor.shape[-1])
    if recipe == "int8" and block >= 64:  # its 256 steps are FBGEMM's; test_saved_memory compares these with float64
        rows = tensor.detach().contiguous().view(-1, block).float()
        packed = torch.ops.quantized.embedding_bag_byte_prepack(rows)
        return torch.ops.quantized.embedding_bag_byte_unpack(packed).to(tensor.dtype).view(tensor.shape)
    if recipe == "bf16":
        return tensor.detach() if tensor.dtype is not torch.float32 else blockwise(tensor, bf16, block)
    return blockwise(tensor, fp8, block)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, recipe: str, block: int = 0) -> Tensor:
        ctx.save_for_backward(quantised(x, recipe, block), weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return (rows @ weight).view(x.shape), rows.t() @ x.flatten(0, -2), rows.sum(0), None, None


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(quantised(x, recipe))
        return aten.gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return aten.gelu_backward(grad, *ctx.saved_tensors), None


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, recipe: str) -> Tensor:
        result = aten._softmax(x, -1, False)
        ctx.save_for_backward(quantised(result, recipe))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return aten._softmax_backward_data(grad.contiguous(), result, -1, result.dtype), None


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, recipe: str) -> Tensor:
        result, mean, rstd = aten.native_layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
        ctx.save_for_backward(quantised(x, recipe), mean, rstd, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        return *aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, rstd, weight, bias, [True] * 3), None


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, recipe: str) -> Tensor:
        noise = torch.empty_like(x).bernoulli_(0.9).div_(0.9)
        ctx.save_for_backward(noise)  # a bit each
        return x * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class Attention(torch.autograd.Function):
    """Queries, keys and values come as they are computed, [batch, length, heads, width], which is their order in memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, recipe: str) -> Tensor:
        given = [each.transpose(1, 2) for each in (q, k, v)]
        result, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*given)
        ctx.save_for_backward(*(quantised(each, recipe) for each in (q, k, v, result.transpose(1, 2))), logsumexp)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *kept, logsumexp = ctx.saved_tensors
        q, k, v, result = (each.transpose(1, 2) for each in kept)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, result, logsumexp, 0.0, False)
        return *(each.transpose(1, 2) for each in grads), None


def storages() -> dict[int, int]:
    """Address and bytes of the memory of every tensor that Python's collector looks at."""
    found = {}
    objects = gc.get_objects()
    for each in itertools.compress(objects, map({Tensor, torch.nn.Parameter}.__contains__, map(type, objects))):
        if each.layout is torch.strided and not each.is_meta and torch._C._has_storage(each):  # none under vmap
            storage = each.untyped_storage()
            with contextlib.suppress(RuntimeError):  # a tracer's, without memory, that another test has left
                found[storage.data_ptr()] = storage.nbytes()
    return found


@contextlib.contextmanager
def only_what_is_new() -> Iterator[dict[int, int]]:
    """Python's collector does not go again through what there is, a million objects; the memory that there is."""
    gc.unfreeze()  # conftest.py has frozen what was there before this file
    known = storages()
    gc.freeze()
    yield known


def bytes_of(forward: Callable[[], Any], known: dict[int, int] | None = None) -> tuple[int, Any]:
    """What is alive behind `forward()` that was not before it, its result apart: in bytes of memory, each once.

    `known` is what `only_what_is_new()` knows, around several calls.
    """
    if known is None:
        with only_what_is_new() as known:
            # the less of two: in one of several runs of all tests a MiB of something else came to light in between, and nobody found what
            return min((bytes_of(forward, known) for _ in range(2)), key=lambda found: found[0])
    before = known | storages()
    result = forward()
    gc.collect()
    after = storages()
    mine = {each.untyped_storage().data_ptr() for each in (result if isinstance(result, (list, tuple)) else (result,))}
    return sum(nbytes for address, nbytes in after.items() if address not in before and address not in mine), result
