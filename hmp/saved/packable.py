"""Which ops keep what can be packed, and which may not be on a policy's list.

Each op of torch's own test data was run with what it keeps rounded: here are those whose gradients were far from what they were, and those
that would be where inputs are larger, or nearer to each other, than these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_WHY = {
    "its backward divides by what it keeps, and a small number would be rounded to 0": """
        acos acosh addcdiv asin asinh atan2 atanh corrcoef cosine_similarity cumprod digamma div erfinv floor_divide fmod hypot lgamma log
        log10 log1p log2 logit masked.cumprod masked.norm masked.normalize masked.prod masked.std mvlgamma norm normalize pairwise_distance
        polygamma prod remainder renorm rrelu special.entr special.log_ndtr special.ndtri special.xlog1py special.zeta sqrt std std_mean
        weight_norm local_response_norm xlogy""",
    "its backward compares what it keeps, and equal numbers would differ": """
        amax amin aminmax cdist clamp clamp_max clamp_min clip copysign dist fmax fmin hardshrink hardsigmoid hardtanh index_reduce
        masked.amax masked.amin max maximum median min minimum mode nanmedian pdist relu6 scatter_reduce softshrink threshold""",
    "its backward solves with the factors that it keeps, which multiplies their error": """
        cholesky cholesky_inverse cholesky_solve cov det geqrf inverse lobpcg logdet lstsq lu lu_solve matrix_exp matrix_power orgqr ormqr
        pca_lowrank pinverse qr slogdet svd svd_lowrank triangular_solve""",
    "its backward takes the exponential of what it keeps, which multiplies its error": """
        cosh gumbel_softmax log_softmax logaddexp logaddexp2 logcumsumexp logsumexp masked.log_softmax masked.logaddexp masked.logsumexp
        sinh softmin""",
    "its backward takes the difference of what it keeps, which may be smaller than their errors": """
        adaptive_log_softmax_with_loss binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss
        gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss linear_cross_entropy margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss multilabel_soft_margin_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss
        triplet_margin_loss triplet_margin_with_distance_loss""",
    "its backward looks up angles or positions that it keeps, which may be large": """
        cos grid_sample grid_sampler grid_sampler_2d grid_sampler_3d polar sin sinc tan""",
    "it keeps buffers of a kernel, which mean nothing without their last bit": "mkldnn_rnn_layer",
}
_REASONS = {op: why for why, ops in _WHY.items() for op in ops.split()}
_SOLVES = _REASONS["inverse"]
_OF_LINALG = frozenset({"linalg.cross", "linalg.matmul", "linalg.multi_dot", "linalg.vecdot"})

# The ops that keep numbers for backward which can be packed: `*` stands for them.
KEEPS = frozenset(
    """abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    addbmm addcmul addmm addmv addr alpha_dropout atan avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bilinear bmm celu conv1d
    conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d cross cummax cummin dot dropout dropout1d dropout2d
    dropout3d einsum elu embedding_bag erf erfc exp exp2 expm1 feature_alpha_dropout feature_dropout float_power fractional_max_pool2d
    fractional_max_pool3d gather gelu glu group_norm gru gru_cell hardswish i0 index_add index_copy inner instance_norm interpolate
    kron layer_norm ldexp leaky_relu lerp linear logsigmoid lp_pool1d lp_pool2d lstm lstm_cell masked_select matmul max_pool1d
    max_pool1d_with_indices max_pool2d max_pool3d mish mm mul multiply mv native_batch_norm native_dropout native_group_norm
    native_layer_norm outer pad pow prelu reciprocal relu rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell rsqrt
    scaled_dot_product_attention selu sigmoid silu softmax softplus softsign square take take_along_dim tanh tanhshrink tensordot var
    var_mean vdot""".split()
)


def why_never(line: Iterable[str]) -> str:
    """Why what an op keeps can't be packed, "" where it can; `line` is its id and those of the ops that it follows."""
    for op in line:
        if op in _REASONS:
            return _REASONS[op]
        if op.startswith("linalg.") and op not in _OF_LINALG:
            return _SOLVES
    return ""


def why_not(op: str, args: tuple[Any, ...]) -> str:
    """Why this call of an op that may be listed can't have packed what it keeps, "" where it can."""
    if op not in _POWERS:
        return ""
    exponent = args[1] if len(args) > 1 else None
    if isinstance(exponent, (int, float)) and exponent >= 1:
        return ""
    return "an exponent that is no number from 1 on, whose backward may divide by what it keeps"


_POWERS = frozenset({"pow", "float_power", "pow_", "ipow", "float_power_"})


def is_statistic(op: str, shape: tuple[int, ...]) -> bool:
    """Whether what the op keeps in this shape are its statistics, whatever their number: the logarithms of an attention's sums."""
    return op == "scaled_dot_product_attention" and (len(shape) < 4 or shape[-1] == 1)
