"""Which ops keep what can be packed, how each may be packed, and which may not be on a policy's list.

Each op of torch's own test data was run with what it keeps rounded: here are those whose gradients were far from what they were, and those
that would be where inputs are larger, or nearer to each other, than these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..core.torch_private import memory_of, storage_of
from .formats import BF16, FORMATS, FP8, INT8, NOISE, POSITIVE, SIGN, Format, Tensor

_WHY = {
    "its backward divides by saved values, and small ones would be rounded to 0": """
        acos acosh addcdiv asin asinh atan2 atanh corrcoef cosine_similarity cumprod digamma div erfinv floor_divide fmod hypot lgamma log
        log10 log1p log2 logit masked.cumprod masked.norm masked.normalize masked.prod masked.std mvlgamma norm normalize pairwise_distance
        polygamma prod remainder renorm rrelu special.entr special.log_ndtr special.ndtri special.xlog1py special.zeta sqrt std std_mean
        weight_norm local_response_norm xlogy""",
    "its backward compares saved values, and equal ones would differ": """
        amax amin aminmax cdist clamp clamp_max clamp_min clip copysign dist fmax fmin hardshrink hardsigmoid hardtanh index_reduce
        hardswish lp_pool1d lp_pool2d lp_pool3d masked.amax masked.amin max maximum median min minimum mode nanmedian nextafter pdist relu6
        scatter_reduce segment_reduce softshrink threshold""",
    "its backward solves with saved factors, which multiplies their error": """
        cholesky cholesky_inverse cholesky_solve cov det geqrf inverse lobpcg logdet lstsq lu lu_solve matrix_exp matrix_power orgqr ormqr
        pca_lowrank pinverse qr slogdet svd svd_lowrank triangular_solve""",
    "its backward takes the exponential of saved values, which multiplies their error": """
        cosh gumbel_softmax log_softmax logaddexp logaddexp2 logcumsumexp logsumexp masked.log_softmax masked.logaddexp masked.logsumexp
        sinh softmin""",
    "its backward subtracts saved values, and the difference may be smaller than their errors": """
        adaptive_log_softmax_with_loss binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss
        gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss linear_cross_entropy margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss multilabel_soft_margin_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss
        triplet_margin_loss triplet_margin_with_distance_loss""",
    "its backward uses saved angles or positions, which may be large": """
        cos grid_sample grid_sampler grid_sampler_2d grid_sampler_3d polar sin sinc tan""",
    "it saves a kernel's internal buffers, which must not be rounded": "mkldnn_rnn_layer",
}
_REASONS = {op: why for why, ops in _WHY.items() for op in ops.split()}
_SOLVES = _REASONS["inverse"]
_OF_LINALG = frozenset({"linalg.cross", "linalg.matmul", "linalg.multi_dot", "linalg.vecdot"})

# The ops that keep numbers for backward which can be packed: `*` means them.
KEEPS = frozenset(
    """abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    addbmm addcmul addmm addmv addr alpha_dropout atan avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bilinear bmm celu conv1d
    conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d cross cummax cummin dot dropout dropout1d dropout2d
    dropout3d einsum elu embedding_bag erf erfc exp exp2 expm1 feature_alpha_dropout feature_dropout float_power fractional_max_pool2d
    fractional_max_pool3d gather gelu glu group_norm gru gru_cell i0 index_add index_copy inner instance_norm interpolate
    kron layer_norm ldexp leaky_relu lerp linear logsigmoid lstm lstm_cell masked_select matmul max_pool1d
    max_pool1d_with_indices max_pool2d max_pool3d mish mm mul multiply mv native_batch_norm native_dropout native_group_norm
    native_layer_norm outer pad pow prelu reciprocal relu rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell rsqrt
    scaled_dot_product_attention selu sigmoid silu softmax softplus softsign square take take_along_dim tanh tanhshrink tensordot var
    var_mean vdot""".split()
)


def why_never(line: Iterable[str]) -> str:
    """Return why what an op keeps can't be packed, "" where it can; `line` is its id and those of the ops that it follows."""
    for op in line:
        if op in _REASONS:
            return _REASONS[op]
        if op.startswith("linalg.") and op not in _OF_LINALG:
            return _SOLVES
    return ""


def why_not(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why this call of an op that may be listed can't have packed what it keeps, "" where it can."""
    if op == "softmax":
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Tensor) and dim not in (-1, given.dim() - 1):
            return "a softmax over a dimension other than the last"
    if op not in _POWERS:
        return ""
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    if isinstance(exponent, (int, float)) and exponent >= 1:
        return ""
    return "an exponent that isn't a number >= 1, because its backward may divide by a saved value"


_POWERS = frozenset({"rpow", "pow", "float_power", "pow_", "ipow", "float_power_"})


# --- how what an op keeps may be packed ---------------------------------------------------------------------------------------------------

# Of what these keep backward asks for a sign or a mask alone, and of what the pools keep for its shape: bits are enough, and exact.
_BITS = {
    "relu": POSITIVE, "leaky_relu": SIGN, "abs": SIGN, "dropout": NOISE, "dropout1d": NOISE, "dropout2d": NOISE, "dropout3d": NOISE,
    "feature_dropout": NOISE, "alpha_dropout": NOISE, "feature_alpha_dropout": NOISE,
}  # fmt: skip
_FOR_ITS_SHAPE = frozenset(
    f"{kind}{d}d" for kind in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool") for d in (1, 2, 3)
)  # fmt: skip
# The backward of these takes the numbers, and does another thing on each side of zero: signs and zeros come back exactly.
ASKS_FOR_SIGNS = frozenset("celu elu float_power pow prelu rnn_relu rnn_relu_cell rpow selu softsign".split())
# Where each number's share in backward grows with the numbers of its own row, at most, the even steps of int8 are near enough. The others
# sum over a row, or over several that differ by orders of magnitude: float8 distinguishes what is small.
_EVEN_STEPS = frozenset(
    "gelu glu layer_norm linear mish mul multiply native_layer_norm rms_norm scaled_dot_product_attention sigmoid silu softmax tanh".split()
)
# Products and convolutions reduce over a row as it is in memory, or sum over it in backward, whatever view of it they are given.
_BY_MEMORY = frozenset(
    """addbmm addmm addmv addr baddbmm bilinear bmm conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d dot
    einsum inner kron linalg.matmul linalg.multi_dot matmul mm mv outer tensordot""".split()
)
_NORMS = frozenset("batch_norm group_norm instance_norm layer_norm native_batch_norm native_group_norm native_layer_norm rms_norm".split())
_OF_GROUPS = frozenset({"group_norm", "native_group_norm"})


class Packing(NamedTuple):
    """How what an op keeps is packed: the format, whether signs must come back exactly, and whether rows are those of memory."""

    form: Format
    signs: bool
    by_memory: bool


NOISE_INSIDE = Packing(NOISE, True, False)


def packing_of(op: str, recipe: str) -> Packing:
    """Return how what the op keeps is packed under the recipe."""
    name = op.rstrip("_")
    if name in _FOR_ITS_SHAPE:
        return Packing(POSITIVE, False, False)
    if name in _BITS:
        return Packing(_BITS[name], True, False)
    form = FP8 if recipe == INT8.name and name not in _EVEN_STEPS else FORMATS[recipe]
    return Packing(form, name in ASKS_FOR_SIGNS, name in _BY_MEMORY)


def for_all(ways: Iterable[Packing]) -> tuple[Format, bool]:
    """Return the format for memory that several ops keep, and whether signs must come back exactly."""
    ways = list(ways)
    signs = any(way.signs for way in ways)
    forms = {way.form for way in ways if not way.form.is_bits}
    if not forms:
        bits = {way.form for way in ways}
        return (bits.pop() if len(bits) == 1 else FP8 if NOISE in bits else SIGN), True
    return (forms.pop() if len(forms) == 1 else BF16 if BF16 in forms else FP8), signs


_DROP_INSIDE = frozenset("gru lstm rnn_relu rnn_tanh scaled_dot_product_attention".split())
_LOOKED_AT = 64


def is_noise(op: str, tensor: Tensor, args: tuple[Any, ...]) -> bool:
    """Return True if the op saves the mask of a dropout inside it: numbers that are 0 or one other, and must come back exactly."""
    if op not in _DROP_INSIDE:
        return False
    given = [1 / (1 - each) for each in args if type(each) is float and 0 < each < 1]
    if not given or not tensor.is_cpu or not tensor.is_contiguous():
        return False
    first = set(tensor.detach().view(-1)[:_LOOKED_AT].tolist()) - {0.0}
    return len(first) == 1 and any(abs(first.copy().pop() - each) < 0.01 * each for each in given)


def is_statistic(op: str, tensor: Tensor, args: tuple[Any, ...]) -> bool:
    """Return True if what the op keeps are its statistics, whatever their number.

    Means and deviations, the logarithms of an attention's sums.
    """
    if op in _NORMS:
        given = next((a for a in args if isinstance(a, Tensor)), None)
        if given is None or tensor.numel() != given.numel() or tensor.shape[-1] == 1:
            return True
        # of groups of one channel there are as many as numbers
        return op in _OF_GROUPS and tensor.dim() == 2 and memory_of(storage_of(tensor)) != memory_of(storage_of(given))
    if op == "scaled_dot_product_attention":
        query = next((a for a in args if isinstance(a, Tensor)), None)
        # one number for each row of the query; a kernel of several ops puts batch and heads into one dimension
        return query is None or tensor.shape[:-1] == query.shape[:-2] or tensor.shape[-1] == 1
    return False
