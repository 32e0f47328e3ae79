"""`gaudi` and `apex-o1` hold the lists that their authors published, and do with ops what those lists say."""

from __future__ import annotations

import pytest
import torch

import hmp
from oracle import BF16, F16, F32

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


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"])
def test_apex_runs_recurrent_layers_and_cells_in_float16(kind: str) -> None:
    module = getattr(torch.nn, kind)(3, 4)
    with hmp.casts("apex-o1"):
        result = module(ones(2, 3) if kind.endswith("Cell") else ones(5, 2, 3))
    assert (result if isinstance(result, torch.Tensor) else result[0]).dtype is F16
