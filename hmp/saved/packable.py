"""Which ops may be on a policy's list of what is kept packed, and which keep nothing that could be packed."""

from __future__ import annotations

from typing import Any

# Ops whose backward needs what they keep to the last bit → why. A name stands for its in-place and reflected forms and synonyms too.
_DIVIDES = "its backward divides by what it keeps, and a small number would be rounded to 0"
_COMPARES = "its backward looks for a number that it keeps among others that it keeps, which are rounded apart from it"
_SOLVES = "its backward solves with the factors that it keeps, which multiplies their error"
_EXPONENTIATES = "its backward takes the exponential of what it keeps, which multiplies its error"
_OPAQUE = "it keeps a kernel's own buffers, which mean nothing without their last bit"

NOT_PACKED: dict[str, str] = {
    **dict.fromkeys(
        (
            "acosh asinh atan2 cosine_similarity cumprod digamma div floor_divide fmod hypot lgamma linalg.matrix_norm linalg.norm "
            "linalg.vector_norm local_response_norm log log10 log1p log2 logit masked.prod norm normalize pairwise_distance pdist "
            "polygamma prod remainder renorm special.entr special.xlog1py special.zeta sqrt std std_mean weight_norm xlogy"
        ).split(),
        _DIVIDES,
    ),
    **dict.fromkeys(("amax amin aminmax cdist dist fmax fmin max maximum median min minimum mode nanmedian").split(), _COMPARES),
    **dict.fromkeys(
        (
            "cholesky cholesky_inverse cholesky_solve det geqrf inverse lobpcg logdet lstsq lu lu_solve matrix_exp matrix_power "
            "orgqr ormqr pca_lowrank pinverse qr slogdet svd svd_lowrank triangular_solve"
        ).split(),
        _SOLVES,
    ),
    **dict.fromkeys(
        (
            "adaptive_log_softmax_with_loss binary_cross_entropy cross_entropy ctc_loss gaussian_nll_loss gumbel_softmax kl_div "
            "linear_cross_entropy log_softmax logaddexp logaddexp2 logcumsumexp logsumexp multilabel_soft_margin_loss nll_loss "
            "poisson_nll_loss"
        ).split(),
        _EXPONENTIATES,
    ),
    **dict.fromkeys(("_cudnn_rnn miopen_rnn mkldnn_rnn_layer").split(), _OPAQUE),
}

# Ops that keep no number for backward, at most indices and masks.
KEEP_NOTHING = frozenset(
    (
        "__and__ adaptive_avg_pool1d adaptive_avg_pool2d add all allclose any argmax argmin argsort bincount bitwise_and "
        "bitwise_not bitwise_or bitwise_xor bucketize cat ceil column_stack concat concatenate copysign count_nonzero cumsum "
        "diff dstack embedding eq equal flip fliplr flipud floor fold frac ge gt heaviside hstack index_fill index_select "
        "interpolate isclose isfinite isin isinf isnan le logical_and logical_not logical_or logical_xor lt masked_fill "
        "masked_select mean multinomial ne neg negative nonzero one_hot pad pixel_shuffle pixel_unshuffle positive "
        "repeat_interleave roll rot90 round row_stack searchsorted sign signbit stack sub subtract sum tile trace tril triu "
        "trunc unfold upsample vstack where"
    ).split()
)


def why_not(op: str, args: tuple[Any, ...]) -> str:
    """Why this call of an op that may be listed can't have packed what it keeps; "" where it can."""
    if op in _POWERS:
        exponent = args[1] if len(args) > 1 else None
        if not isinstance(exponent, (int, float)) or exponent < 1:
            return "an exponent that is no number from 1 on, whose backward may divide by what it keeps"
    return ""


_POWERS = frozenset({"pow", "float_power"})
