"""A call of each op on the presets' low-precision lists, on tensors large enough that its kernel and not the call takes the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_N, _B = 128, 8
_IMAGES, _KERNEL = (4, 32, 16, 16), (32, 32, 3, 3)
_VOLUMES, _KERNEL_3D = (2, 16, 8, 8, 8), (16, 16, 3, 3, 3)
_HEADS = (4, 4, 64, 32)
_WIDE = (_N, 512)


@dataclass
class Call:
    """An op by the name that lists have for it, the function that calls it, and its float32 tensors."""

    op: str
    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]

    def run(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return the result of the call, of several the first."""
        result = self.function(*tensors)
        while isinstance(result, (tuple, list)):
            result = result[0]
        return result


_MATRICES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, ((_N, _N), (_N, _N), (_N,))),
    "matmul": (torch.matmul, ((_B, _N, 64), (_B, 64, _N))),
    "mm": (torch.mm, ((_N, _N), (_N, _N))),
    "bmm": (torch.bmm, ((_B, _N, 64), (_B, 64, _N))),
    "addmm": (torch.addmm, ((_N, _N), (_N, _N), (_N, _N))),
    "addbmm": (torch.addbmm, ((_N, _N), (_B, _N, 64), (_B, 64, _N))),
    "baddbmm": (torch.baddbmm, ((_B, _N, _N), (_B, _N, 64), (_B, 64, _N))),
    "_addmm_activation": (torch._addmm_activation, ((_N,), (_N, _N), (_N, _N))),
    "inner": (torch.inner, ((_N, _N), (_N, _N))),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((_B, _N, 64), (_B, 64, _N))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), ((_N, _N), (_N, _N))),
    "chain_matmul": (torch.chain_matmul, ((_N, _N), (_N, _N), (_N, _N))),
    "linalg.multi_dot": (lambda *each: torch.linalg.multi_dot(each), ((_N, _N), (_N, _N), (_N, _N))),
    "matrix_power": (lambda x: torch.matrix_power(x, 3), ((_N, _N),)),
    "cov": (torch.cov, ((_N, _N),)),
    "corrcoef": (torch.corrcoef, ((_N, _N),)),
    "bilinear": (F.bilinear, ((32, 32), (32, 32), (32, 32, 32))),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, (_HEADS, _HEADS, _HEADS)),
    "addmv": (torch.addmv, ((512,), (512, 512), (512,))),
    "mv": (torch.mv, ((512, 512), (512,))),
    "dot": (torch.dot, ((2**16,), (2**16,))),
    "linalg.vecdot": (torch.linalg.vecdot, (_WIDE, _WIDE)),
    "addr": (torch.addr, ((512, 512), (512,), (512,))),
    "conv1d": (F.conv1d, ((4, 32, 256), (32, 32, 3))),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (_IMAGES, _KERNEL)),
    "conv3d": (F.conv3d, (_VOLUMES, _KERNEL_3D)),
    "conv_tbc": (torch.conv_tbc, ((64, 4, 32), (3, 32, 32), (32,))),
    "conv_transpose1d": (F.conv_transpose1d, ((4, 32, 256), (32, 32, 3))),
    "conv_transpose2d": (F.conv_transpose2d, (_IMAGES, _KERNEL)),
    "conv_transpose3d": (F.conv_transpose3d, (_VOLUMES, _KERNEL_3D)),
    "convolution": (lambda x, w: torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), (_IMAGES, _KERNEL)),
}
_OTHERS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "add": (torch.add, (_WIDE, _WIDE)),
    "mul": (torch.mul, (_WIDE, _WIDE)),
    "rsub": (torch.rsub, (_WIDE, _WIDE)),
    "div": (torch.div, (_WIDE, _WIDE)),
    "pow": (lambda x: torch.pow(x, 2), (_WIDE,)),
    "relu": (F.relu, (_WIDE,)),
    "leaky_relu": (F.leaky_relu, (_WIDE,)),
    "prelu": (F.prelu, (_WIDE, (1,))),
    "gelu": (F.gelu, (_WIDE,)),
    "softmax": (lambda x: F.softmax(x, -1), (_WIDE,)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), (_WIDE,)),
    "dropout": (lambda x: F.dropout(x, 0.1), (_WIDE,)),
    "mean": (torch.mean, (_WIDE,)),
    "masked.prod": (lambda x: torch.masked.prod(x, -1), (_WIDE,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (512,), w, b), (_WIDE, (512,), (512,))),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (_IMAGES, (32,), (32,))),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), (_IMAGES, (32,), (32,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (_IMAGES, (32,), (32,))),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (_IMAGES,)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (_IMAGES,)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (_VOLUMES,)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (_IMAGES,)),
    "pad": (lambda x: F.pad(x, (1, 1)), (_IMAGES,)),
}
WITHOUT_DERIVATIVE = frozenset({"_addmm_activation"})
_RECURRENT: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": partial(nn.RNN, nonlinearity="relu"),
    "lstm_cell": nn.LSTMCell,
    "gru_cell": nn.GRUCell,
    "rnn_tanh_cell": nn.RNNCell,
    "rnn_relu_cell": partial(nn.RNNCell, nonlinearity="relu"),
}


def calls() -> Iterator[Call]:
    """Yield a call of each op."""
    torch.manual_seed(0)
    for table in (_MATRICES, _OTHERS):
        for op, (function, shapes) in table.items():
            yield Call(op, function, tuple(0.1 * torch.randn(shape) for shape in shapes))
    if hasattr(F, "linear_cross_entropy"):
        yield Call("linear_cross_entropy", *_linear_cross_entropy())
    yield Call("sparse.mm", *_sparse())
    for op, make in _RECURRENT.items():
        yield Call(op, *_of_module(make(_N, _N), torch.randn(32, _N) if op.endswith("_cell") else torch.randn(16, 16, _N)))


def _linear_cross_entropy() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    labels = torch.arange(_N)
    return lambda x, w: F.linear_cross_entropy(x, w, labels), (0.1 * torch.randn(_N, _N), 0.1 * torch.randn(512, _N))


def _sparse() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    tenth = (torch.randn(_N, _N) * (torch.rand(_N, _N) < 0.1)).to_sparse()
    by_dtype = {dtype: tenth.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    return lambda dense: torch.sparse.mm(by_dtype[dense.dtype], dense), (torch.randn(_N, _N),)


def _of_module(module: nn.Module, given: Tensor) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Return a function of the module's input and parameters, and these."""
    names = [name for name, _ in module.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    return run, (given, *(p.detach().clone() for p in module.parameters()))
