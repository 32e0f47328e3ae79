"""`gaudi` and `apex-o1` hold the lists that their authors published, and do with ops what those lists say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from oracle import BF16, F16, F32, assert_identical

GAUDI = {
    "bf16": """addmm addbmm batch_norm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d dot dropout
        feature_dropout group_norm instance_norm layer_norm leaky_relu linear matmul mean mm mul mv softmax log_softmax
        scaled_dot_product_attention""",
    "fp32": """acos addcdiv asin atan2 bilinear binary_cross_entropy binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
        cosine_similarity cross_entropy dist div divide embedding embedding_bag erfinv exp expm1 hinge_embedding_loss huber_loss kl_div
        l1_loss log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss pdist
        poisson_nll_loss pow reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan topk triplet_margin_loss truediv
        true_divide""",
    "promote": "add addcmul addcdiv cat div exp mul pow sub iadd truediv stack",
}
# apex.amp's lists/functional_overrides.py, torch_overrides.py and tensor_overrides.py (from CUDA 9.1 on), one after the other.
APEX = {
    "bf16": """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv addr matmul mm mv
        addbmm baddbmm bmm matmul""",
    "fp32": """interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm normalize
        cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss
        margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss
        binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss
        acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std sum var renorm
        pow""",
    "promote": """addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne cat stack
        add div eq ge gt le lt mul ne sub""",
}
# What apex.amp says elsewhere than in its lists: recurrent layers and cells run in float16, the banned loss in float32 where it is allowed.
APEX_BESIDES = {
    "bf16": "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    "fp32": "binary_cross_entropy",
    "promote": "",
}


@pytest.mark.parametrize("cast", ["bf16", "fp32", "promote"])
def test_gaudi_and_apex_hold_the_published_lists_to_the_letter(cast: str) -> None:
    gaudi, apex = hmp.Policy.load("gaudi"), hmp.Policy.load("apex-o1")
    assert getattr(gaudi, cast) == set(GAUDI[cast].split())
    assert getattr(apex, cast) == set(APEX[cast].split()) | set(APEX_BESIDES[cast].split())
    assert (gaudi.dtype, apex.dtype) == (BF16, F16)


def ones(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).reshape(shape).to(dtype)


# name: the call, its arguments, the dtype that it computes in; None where torch promotes by itself
Row = tuple[Callable[..., Any], tuple[Any, ...], torch.dtype | None]
APEX_OPS: dict[str, Row] = {
    "conv2d": (lambda x, w: F.conv2d(x, w), (ones(1, 2, 4, 4), ones(3, 2, 2, 2)), F16),
    "linear": (lambda x, w, b: F.linear(x, w, b), (ones(2, 3), ones(4, 3), ones(4)), F16),
    "@": (lambda a, b: a @ b, (ones(2, 3), ones(3, 2, dtype=F16)), F16),
    "bmm": (lambda a, b: torch.bmm(a, b), (ones(2, 3, 4), ones(2, 4, 3)), F16),
    "addmv": (lambda a, b, c: a.addmv(b, c), (ones(2), ones(2, 3), ones(3)), F16),
    "prelu": (lambda x, w: F.prelu(x, w), (ones(4), ones(1)), F16),
    "exp": (lambda x: torch.exp(x), (ones(4, dtype=F16),), F32),
    "x ** 1.5": (lambda x: x**1.5, (ones(4, dtype=F16),), F32),
    "softmax": (lambda x: F.softmax(x, 0), (ones(4, dtype=F16),), F32),
    "gelu": (lambda x: F.gelu(x), (ones(4, dtype=F16),), F32),
    "sum": (lambda x: x.sum(), (ones(4, dtype=F16),), F32),
    "std": (lambda x: x.std(), (ones(4, dtype=F16),), F32),
    "norm": (lambda x: x.norm(), (ones(4, dtype=F16),), F32),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w), (ones(2, 4, dtype=F16), ones(4)), F32),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 1])), (ones(2, 3, dtype=F16),), F32),
    "binary_cross_entropy": (lambda x, y: F.binary_cross_entropy(x, y), (ones(4, dtype=F16), ones(4, dtype=F16)), F32),
    "add": (lambda a, b: a + b, (ones(4, dtype=F16), ones(4)), F32),
    "rsub": (lambda a, b: b - a, (ones(4, dtype=F16), ones(4)), F32),
    "mul of two halves": (lambda a, b: a * b, (ones(4, dtype=F16), ones(4, dtype=F16)), F16),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c), (ones(4, dtype=F16), ones(4), ones(4, dtype=F16)), F32),
    "dot": (lambda a, b: torch.dot(a, b), (ones(4, dtype=F16), ones(4)), F32),
    "bilinear": (lambda a, b, w: F.bilinear(a, b, w), (ones(2, 3, dtype=F16), ones(2, 4), ones(5, 3, 4)), F32),
    "cat": (lambda a, b: torch.cat([a, b]), (ones(4, dtype=F16), ones(4)), F32),
    "stack of halves": (lambda a, b: torch.stack([a, b]), (ones(4, dtype=F16), ones(4, dtype=F16)), F16),
    "gt": (lambda a, b: a > b, (ones(4, dtype=F16), ones(4)), None),
    "relu, on no list": (lambda x: F.relu(x), (ones(4, dtype=F16),), F16),
    "max_pool2d, on no list": (lambda x: F.max_pool2d(x, 2), (ones(1, 1, 4, 4),), F32),
}
GAUDI_OPS: dict[str, Row] = {
    "mul, on the lower list and on promote": (lambda a, b: a * b, (ones(4), ones(4)), BF16),
    "mean": (lambda x: x.mean(), (ones(4),), BF16),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), (ones(2, 4),), BF16),
    "softmax": (lambda x: x.softmax(0), (ones(4),), BF16),
    "sdpa": (lambda q: F.scaled_dot_product_attention(q, q, q), (ones(1, 1, 4, 8),), BF16),
    "div, on the fp32 list and on promote": (lambda a, b: torch.div(a, b), (ones(4, dtype=BF16), ones(4, dtype=BF16)), F32),
    "/, on both as truediv": (lambda a, b: a / b, (ones(4, dtype=BF16), ones(4, dtype=BF16)), F32),
    "exp, on both": (lambda x: x.exp(), (ones(4, dtype=BF16),), F32),
    "pow, on both": (lambda x: x**2, (ones(4, dtype=BF16),), F32),
    "addcdiv, on both": (lambda a: torch.addcdiv(a, a, a), (ones(4, dtype=BF16),), F32),
    "topk": (lambda x: x.topk(2)[0], (ones(4, dtype=BF16),), F32),
    "embedding": (lambda w: F.embedding(torch.tensor([1, 0]), w), (ones(2, 3, dtype=BF16),), F32),
    "addcmul, on promote": (lambda a, b: torch.addcmul(a, b, b), (ones(4, dtype=BF16), ones(4)), F32),
    "add, on promote": (lambda a, b: a + b, (ones(4, dtype=BF16), ones(4)), F32),
    "stack, on promote": (lambda a, b: torch.stack([a, b]), (ones(4, dtype=BF16), ones(4)), F32),
    "iadd, in place": (lambda a, b: a.clone().__iadd__(b), (ones(4, dtype=BF16), ones(4)), BF16),
    "gelu, on no list": (lambda x: F.gelu(x), (ones(4, dtype=BF16),), BF16),
}


@pytest.mark.parametrize(("preset", "table"), [("apex-o1", APEX_OPS), ("gaudi", GAUDI_OPS)], ids=["apex-o1", "gaudi"])
def test_ops_compute_in_the_dtype_that_the_published_list_gives_them(preset: str, table: dict[str, Row]) -> None:
    for name, (call, args, dtype) in table.items():
        # in place torch computes the mixture itself and rounds once
        by_hand = args if dtype is None or name.endswith("in place") else [a.to(dtype) for a in args]
        want = call(*by_hand)
        with hmp.casts(preset):
            got = call(*args)
        assert_identical(got, want, f"{name} under {preset}")
        assert got.dtype is (dtype or torch.bool), name


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"])
def test_apex_runs_recurrent_layers_and_cells_in_float16(kind: str) -> None:
    module = getattr(torch.nn, kind)(3, 4)
    with hmp.casts("apex-o1"):
        result = module(ones(2, 3) if kind.endswith("Cell") else ones(5, 2, 3))
    assert (result if isinstance(result, torch.Tensor) else result[0]).dtype is F16
