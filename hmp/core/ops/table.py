"""Tables of facts about ops, by id: synonyms, other spellings, and what torch does with mixed dtypes. Measured with torch 2.13.

Facts that differ between releases of torch belong here or in sites.py.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ..torch_private import FLEX_TAKES_MIXTURES, TORCH


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Exact synonyms: same arguments, same result; and functions that compute the same and give indices too, or take a mask of another form.
# An unlisted one follows the first of its group that is listed. Functions of torch.special with the name of one in torch (special.softmax)
# are synonyms too and not repeated here.
SYNONYM_GROUPS: tuple[tuple[str, ...], ...] = tuple(
    tuple(line.split())
    for line in """
    mul multiply
    div divide true_divide truediv
    sub subtract
    mm dsmm spmm
    sspaddmm saddmm
    hspmm hsmm
    grouped_mm _grouped_mm
    abs absolute
    neg negative
    fix trunc
    clamp clip
    acos arccos
    acosh arccosh
    asin arcsin
    asinh arcsinh
    atan arctan
    atanh arctanh
    atan2 arctan2
    cat concat concatenate
    vstack row_stack
    gt greater
    ge greater_equal
    lt less
    le less_equal
    ne not_equal
    outer ger
    inverse linalg.inv
    matmul linalg.matmul
    det linalg.det
    slogdet linalg.slogdet
    matrix_power linalg.matrix_power
    diagonal linalg.diagonal
    movedim moveaxis
    positive pos
    transpose swapaxes swapdims
    orgqr linalg.householder_product
    pinverse linalg.pinv
    igamma special.gammainc
    igammac special.gammaincc
    digamma special.psi
    lgamma special.gammaln
    mvlgamma special.multigammaln
    erfinv special.erfinv
    sigmoid special.expit
    i0 special.i0
    remainder mod
    floor_divide floordiv
    grid_sample grid_sampler
    interpolate upsample
    logsigmoid log_sigmoid
    scaled_dot_product_attention flex_attention
    max_pool1d max_pool1d_with_indices
    max_pool2d max_pool2d_with_indices
    max_pool3d max_pool3d_with_indices
    adaptive_max_pool1d adaptive_max_pool1d_with_indices
    adaptive_max_pool2d adaptive_max_pool2d_with_indices
    adaptive_max_pool3d adaptive_max_pool3d_with_indices
    fractional_max_pool2d fractional_max_pool2d_with_indices
    fractional_max_pool3d fractional_max_pool3d_with_indices
    """.strip().splitlines()
)
SYNONYMS: dict[str, tuple[str, ...]] = {
    name: tuple(other for other in group if other != name) for group in SYNONYM_GROUPS for name in group
}

# Dunder methods of Tensor, without underscores, whose op has another id: `__div__` is truediv. All others keep the name: `__add__` is add.
DUNDER_OPS: dict[str, str] = {"div": "truediv", "idiv": "itruediv", "rdiv": "rtruediv"}
# `__radd__` is the op radd and `__iadd__` is iadd; both follow add.
BINARY_DUNDERS = _names("add sub mul truediv floordiv mod pow matmul")
DUNDERS: tuple[str, ...] = tuple(f"__{prefix}{name}__" for name in sorted(BINARY_DUNDERS) for prefix in ("", "r", "i")) + tuple(
    f"__{name}__" for name in "div rdiv idiv neg pos abs eq ne lt le gt ge getitem setitem invert".split()
)

# The ids of the ops that users call, and ATen's names of them. Overload names (`.Tensor_Scalar`) are removed before the look-up.
_CONVOLUTIONS = " ".join(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3))
ATEN_SPELLINGS: dict[str, tuple[str, ...]] = {
    spelling: tuple(ops.split())
    for line in f"""
    {_CONVOLUTIONS}: _convolution convolution_overrideable
    cross_entropy: cross_entropy_loss
    nll_loss: nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward
    smooth_l1_loss: smooth_l1_loss_forward
    multilabel_margin_loss: multilabel_margin_loss_forward
    cdist: _cdist_forward
    pdist: _pdist_forward
    batch_norm: _batch_norm_impl_index _native_batch_norm_legit native_batch_norm cudnn_batch_norm
    layer_norm: native_layer_norm
    group_norm: native_group_norm
    dropout: native_dropout _fused_dropout
    scaled_dot_product_attention: _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _native_multi_head_attention
    index_put: _index_put_impl_
    bilinear: _trilinear
    linear: mkldnn_linear
    conv1d conv2d conv3d: mkldnn_convolution
    lstm: mkldnn_rnn_layer
    lstm_cell: _thnn_fused_lstm_cell
    gru_cell: _thnn_fused_gru_cell
    grid_sample: grid_sampler_2d grid_sampler_3d
    interpolate: upsample_nearest1d upsample_nearest2d upsample_nearest3d
    interpolate: upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    """.strip().splitlines()
    for ops, _, spellings in [line.partition(": ")]
    for spelling in spellings.split()
}
ATEN_SPELLINGS |= {f"_{op}": (op,) for op in "softmax log_softmax embedding_bag ctc_loss cat stack weight_norm".split()}
ATEN_SPELLINGS |= {f"_adaptive_avg_pool{d}d": (f"adaptive_avg_pool{d}d",) for d in (2, 3)}
ATEN_SPELLINGS |= {f"max_pool{d}d_with_indices": (f"max_pool{d}d",) for d in (1, 2, 3)}
ATEN_SPELLINGS |= {f"_linalg_{name}": (f"linalg.{name}",) for name in ("svd", "eigh", "det", "solve_ex")}

# Names that this torch may lack but that another release of torch, ATen's backward ops or Habana's compiler has: a list may contain them.
FOREIGN = _names(
    """
    embedding_bag_sum_fwd embedding_bag_sum_bwd embedding_bag_sum embedding_bag_preproc kv_reduce_sum sparse_segment_sum
    fused_norm fused_clip_norm optimizer_adamw optimizer_sgd optimizer_lamb custom_foreach_add_ roi_align nms batched_nms
    deform_conv2d gels symeig eig lstsq solve matrix_rank cumulative_max irfft rfft ifft stft_legacy sum_to_size_ lu_unpack_
    bucketize_ pdist_ gru_impl frac_gradient addcdiv_legacy triangular_solve_legacy max_unpool_2d fused_dropout
    linalg.polar
    linalg.matrix_sqrth scaled_mm _scaled_mm grouped_mm _grouped_mm rms_norm fused_rms_norm _fused_rms_norm linear_cross_entropy swiglu
    fused_sdpa sdpa_recomp_fwd sdpa_recomp_bwd rotary_pos_embedding rope optimizer_lars optimizer_ema cast cast_f32_to_bf16
    cast_bf16_to_f32 hpu_cast permute_copy_hpu instance_norm_backward as_strided_lazy strided_view slice_insert dropout_backward
    """
)

# --- dtypes ---------------------------------------------------------------------------------------------------------------

# Ops whose meaning is a dtype, or that only return storage or metadata: never cast, whatever a list says (R7). getitem is here for another
# reason: Python treats a class whose `__getitem__` was ever set as a sequence from then on, and then torch.tensor([loss, loss]) calls len()
# on the 0-dim tensors.
DTYPE_OPS = _names(
    """
    to type type_as copy result_type can_cast promote_types view_as expand_as reshape_as resize_as set set_ float half bfloat16
    double int long short char byte bool cfloat cdouble chalf cpu cuda xpu hpu numpy item tolist data_ptr is_floating_point
    is_complex is_same_size is_nonzero numel dim size stride storage_offset requires_grad_ retain_grad share_memory_ pin_memory
    getitem is_pinned is_shared is_contiguous is_set_to is_inference is_coalesced is_distributed record_stream apply map map2 backward
    """
)

# Ops that compute nothing: their result is a view of their input wherever memory allows one. A list casts none of them, and `*` does not
# include them (R10). F.unfold computes; Tensor.unfold, which is a view, is another op than the one that lists name.
VIEWS = _names(
    """
    adjoint as_strided broadcast_to ccol_indices chunk col_indices conj crow_indices detach diagonal dsplit expand expand_as
    flatten getitem hsplit imag indices moveaxis movedim narrow permute positive pos ravel real reshape reshape_as row_indices
    select slice_inverse split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unsqueeze
    unsafe_chunk unsafe_split values view view_as view_as_complex view_as_real vsplit atleast_1d atleast_2d atleast_3d
    broadcast_tensors meshgrid
    """
)

# Ops that `*` does not include either: they compute no values to be rounded, create tensors or change the layout.
NOT_COMPUTED = _names(
    """
    clone empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full
    as_masked_tensor masked_tensor sparse_coo_tensor sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor
    sparse_bsr_tensor sparse_bsc_tensor spdiags to_sparse to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc to_dense
    to_mkldnn to_padded_tensor contiguous coalesce resolve_conj resolve_neg unfold
    sparse_mask flatten_dense_tensors unflatten_dense_tensors from_file range pad_sequence
    quantize_per_tensor quantize_per_tensor_dynamic quantize_per_channel dequantize
    new_tensor new_empty_strided empty_permuted as_tensor tensor from_numpy frombuffer is_tensor is_storage setitem numpy_T
    """
)

# Joins: a 0-dim tensor counts for the widest dtype, as in torch (R3).
JOINS = _names("cat concat concatenate stack hstack vstack row_stack dstack column_stack block_diag")

_PROMOTING = _names(
    """
    eq ne lt le gt ge less less_equal greater greater_equal not_equal equal isin bucketize searchsorted
    logical_and logical_or logical_xor
    l1_loss mse_loss smooth_l1_loss pairwise_distance
    stft istft diff linspace float_power
    add radd sub subtract rsub mul rmul multiply div divide true_divide truediv floor_divide floordiv fmod remainder mod pow
    atan2 arctan2 hypot copysign nextafter logaddexp logaddexp2 xlogy igamma igammac maximum minimum fmax fmin max min
    clamp clip clamp_min clamp_max where addcmul addcdiv outer ger kron dist
    rfloordiv rmod rpow
    special.xlog1py special.xlogy special.gammainc special.gammaincc special.zeta
    special.chebyshev_polynomial_t special.chebyshev_polynomial_u special.chebyshev_polynomial_v special.chebyshev_polynomial_w
    special.shifted_chebyshev_polynomial_t special.shifted_chebyshev_polynomial_u special.shifted_chebyshev_polynomial_v
    special.shifted_chebyshev_polynomial_w special.hermite_polynomial_h special.hermite_polynomial_he
    special.laguerre_polynomial_l special.legendre_polynomial_p
    """
)
# Before torch 2.13 mixed inputs are promoted in the forward and raise in the backward.
_MSE_LOSS = _names("mse_loss") if TORCH < (2, 13) else _names("")
# torch itself promotes the inputs of these to the widest dtype.
PROMOTED_BY_TORCH = (JOINS | _PROMOTING) - _MSE_LOSS

# Of those, the ones that compute a part in the narrower dtype: in backward (smooth_l1_loss's on CUDA), or anywhere on XLA, whose kernels
# also raise on some mixtures, or take the first input's dtype.
_PROMOTED_IN_PART = _names("addcmul addcdiv atan2 arctan2 pow rpow smooth_l1_loss special.xlog1py") | _names(
    """
    clamp clip clamp_min clamp_max max min maximum minimum div divide true_divide truediv mod rmod remainder where
    logaddexp logaddexp2 xlogy special.xlogy
    """
    if "torch_xla" in sys.modules or find_spec("torch_xla")  # which raises for a placeholder that somebody put there
    else ""
)

# On a promote list these need no wrapper.
PROMOTED_WHOLLY = PROMOTED_BY_TORCH - _PROMOTED_IN_PART

# Ops that raise on mixed inputs, in forward or backward: unlisted, their inputs become the dtype of the first castable one (R7).
MIXED_RAISES = _names(
    """
    huber_loss
    cross linalg.cross cdist grid_sample grid_sampler grid_sampler_2d grid_sampler_3d
    index_add index_copy index_put index_reduce masked_scatter put scatter scatter_add scatter_reduce
    cholesky_solve lu_solve triangular_solve ormqr orgqr linalg.solve linalg.solve_ex linalg.solve_triangular linalg.tensorsolve
    linalg.lu_solve linalg.ldl_solve linalg.lstsq linalg.householder_product
    multi_margin_loss nll_loss cross_entropy binary_cross_entropy embedding_bag
    addmm mm bmm mv dot matmul rmatmul linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    addbmm addmv baddbmm bilinear chain_matmul conv_tbc convolution einsum inner tensordot vdot linalg.matmul linalg.multi_dot
    linalg.vecdot scaled_dot_product_attention sparse.mm sparse.addmm sparse.sampled_addmm smm hspmm sspaddmm
    linear_cross_entropy svd_lowrank pca_lowrank grouped_mm _grouped_mm
    fractional_max_pool2d fractional_max_pool3d
    lerp heaviside prelu polar complex isclose allclose binomial
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    meshgrid cartesian_prod quantile nanquantile histogram histogramdd
    """
) | _names("" if FLEX_TAKES_MIXTURES else "flex_attention")
# Of those, the ones that accept some mixtures, depending on shapes: torch's op is tried first.
MIXED_SOMETIMES_RAISES = _names("einsum inner matmul rmatmul linalg.matmul cdist conv_tbc lstm cross_entropy linear_cross_entropy")
# Of those, the ones where only the kernel raises: with fake and meta tensors, as compilers use, every mixture is accepted.
REFUSED_BY_KERNELS_ALONE = MIXED_SOMETIMES_RAISES - {"einsum", "cdist", "inner"}
# Ops whose forward promotes and whose backward raises on some mixtures: their inputs are promoted before the call.
MIXED_BACKWARD_RAISES = _names("addr") | _MSE_LOSS

# Ops whose in-place form raises on mixed inputs, in forward or backward: the other inputs become the first one's dtype (R5). All other
# in-place ops accept mixed inputs.
MIXED_INPLACE_RAISES = _names(
    """
    addmm addmv addbmm addr baddbmm lerp heaviside index_add index_copy index_put index_reduce masked_scatter put scatter scatter_add
    scatter_reduce map map2 setitem
    """
)

# Ops whose result never shares memory with an input: their casts come from the caches (R18). Of recurrent ops only the weights' casts do.
PRODUCTS = _names(
    """
    linear matmul rmatmul mm bmm mv dot addmm addbmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    bilinear scaled_dot_product_attention
    """
)
CELLS = _names("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
RECURRENT = CELLS | _names("lstm gru rnn_tanh rnn_relu")

# --- kernels --------------------------------------------------------------------------------------------------------------

_EVERY_DEVICE = _names(
    """
    cholesky linalg.cholesky linalg.cholesky_ex cholesky_inverse cholesky_solve geqrf linalg.cond linalg.det logdet linalg.slogdet
    linalg.eig linalg.eigh linalg.eigvals linalg.eigvalsh linalg.householder_product linalg.inv linalg.inv_ex ormqr
    linalg.ldl_factor linalg.ldl_factor_ex linalg.ldl_solve linalg.lstsq lu linalg.lu linalg.lu_factor linalg.lu_factor_ex lu_solve
    linalg.lu_solve linalg.matrix_rank linalg.matrix_sqrth linalg.pinv qr linalg.qr linalg.solve linalg.solve_ex linalg.solve_triangular
    triangular_solve svd linalg.svd linalg.svdvals linalg.tensorinv linalg.tensorsolve linalg.vander pca_lowrank svd_lowrank lobpcg
    matrix_exp cdist pdist ctc_loss polar quantile nanquantile sparse.sampled_addmm stft binomial _standard_gamma _sample_dirichlet
    fft.fft fft.fft2 fft.fftn fft.hfft fft.hfft2 fft.hfftn fft.ifft fft.ifft2 fft.ifftn fft.ihfft fft.ihfft2 fft.ihfftn
    fft.irfft fft.irfft2 fft.irfftn fft.rfft fft.rfft2 fft.rfftn
    special.airy_ai special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1 special.chebyshev_polynomial_t
    special.chebyshev_polynomial_u special.chebyshev_polynomial_v special.chebyshev_polynomial_w special.erfcx
    special.hermite_polynomial_h special.hermite_polynomial_he special.laguerre_polynomial_l special.legendre_polynomial_p
    special.log_ndtr special.modified_bessel_i0 special.modified_bessel_i1 special.modified_bessel_k0 special.modified_bessel_k1
    special.ndtri special.scaled_modified_bessel_k0 special.scaled_modified_bessel_k1 special.shifted_chebyshev_polynomial_t
    special.shifted_chebyshev_polynomial_u special.shifted_chebyshev_polynomial_v special.shifted_chebyshev_polynomial_w
    special.spherical_bessel_j0 special.zeta
    """
)
# (device type or "*" for any, dtypes, ops without a kernel there) (R11). Measured on CPU; for other devices, what torch's own tests
# expect. CUDA has float16 kernels for FFTs of power-of-two length, but they return complex32, which few ops accept.
# on Gaudi: an op without a low-precision kernel runs on the CPU or raises an error that names the dtype, as torch's own kernels do.
NO_KERNEL: tuple[tuple[str, str, frozenset[str]], ...] = (
    ("*", "bfloat16 float16", _EVERY_DEVICE),
    ("*", "bfloat16", _names("complex view_as_complex")),
    ("*", "bfloat16 float16", _names(
        "fused_moving_avg_obs_fake_quant choose_qparams_optimized quantize_per_tensor quantize_per_tensor_dynamic quantize_per_channel"
    )),
    ("*", "float16", _names("_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine")),  # in backward
    ("cpu", "bfloat16 float16", _names(
        "avg_pool3d lp_pool3d _upsample_bilinear2d_aa multi_margin_loss multilabel_margin_loss smm sspaddmm"
    )),
    ("cpu", "float16", _names("rrelu rrelu_with_noise")),
    *((("cpu", "bfloat16 float16", _names("trace")),) if TORCH < (2, 13) else ()),
    ("cuda", "bfloat16 float16", _names("histc igamma igammac lu_unpack")),
)  # fmt: skip
# The same for ops with a forward kernel and no backward kernel, where a gradient is needed. torch 2.15 has all kernels.
NO_BACKWARD_KERNEL: tuple[tuple[str, str, frozenset[str]], ...] = (
    tuple((device, "bfloat16 float16", _names("special.i1 special.i1e")) for device in ("cpu", "cuda")) if TORCH < (2, 15) else ()
)
WITHOUT_KERNEL = frozenset().union(*(names for _, _, names in (*NO_KERNEL, *NO_BACKWARD_KERNEL)))
# Ops that lack a kernel for some arguments: the low-precision dtype is tried, and a failure is remembered.
KERNEL_BY_ARGUMENTS = _names(
    "norm linalg.norm linalg.matrix_norm matrix_power linalg.matrix_power interpolate upsample histogram histogramdd"
)
# Ops whose low-precision CPU kernel is slow where the processor has no instructions for the dtype: they compute in float32 there,
# and so does what follows one of them and writes into no input (linalg.matmul, sparse.mm). benchmarks/results/LOW_KERNELS.md has the times
# of all ops on the presets' low lists. Those that are not here, but for pow in float16, take less time by their own kernel than by casts
# around float32's.
SLOW_WITHOUT_INSTRUCTIONS = _names(
    """
    linear matmul mm bmm addmm addbmm baddbmm inner einsum tensordot chain_matmul linalg.multi_dot matrix_power cov corrcoef
    _addmm_activation linear_cross_entropy bilinear scaled_dot_product_attention
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution _convolution
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """
)
# Of the slow ones those that torch.autocast computes in low precision in part: their result and their state are float32.
WIDE_UNDER_AUTOCAST = _names("gru gru_cell lstm_cell")
# Ops that give other values, some in another dtype, while a dispatch mode looks on: torch.autocast does not reach what their kernels call
# then, or torch takes another routine of LAPACK.
CHANGED_BY_LISTENING = _names(
    """
    bilinear norm nuclear_norm pinverse linalg.pinv linalg.cond linalg.eigvalsh linalg.lstsq linalg.matrix_norm linalg.matrix_rank
    linalg.norm linalg.svdvals
    """
)
# Ops that draw random numbers. A failed call may have drawn some, so these are not retried in float32 (R11).
RANDOM = _names(
    """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout bernoulli binomial
    multinomial normal poisson rrelu rrelu_with_noise gumbel_softmax fractional_max_pool2d fractional_max_pool3d
    scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu svd_lowrank pca_lowrank lobpcg
    rand_like randn_like randint_like _standard_gamma _sample_dirichlet
    """
)

# --- arguments ------------------------------------------------------------------------------------------------------------

# Arguments that the op writes to, and the scales of quantization, which are float32 whatever the input is: they are never cast.
KEPT_ARGUMENTS: dict[str, frozenset[str]] = {
    "rrelu_with_noise": _names("noise"),
    "batch_norm_update_stats": _names("running_mean running_var"),
    "batch_norm_gather_stats": _names("running_mean running_var"),
    "batch_norm_gather_stats_with_counts": _names("running_mean running_var"),
    "fused_moving_avg_obs_fake_quant": _names("observer_on fake_quant_on running_min running_max scale zero_point"),
    **dict.fromkeys(
        (
            "fake_quantize_per_channel_affine",
            "fake_quantize_per_tensor_affine",
            "_fake_quantize_learnable_per_tensor_affine",
            "_fake_quantize_learnable_per_channel_affine",
            "quantize_per_tensor",
        ),
        _names("scale zero_point"),
    ),
    "quantize_per_channel": _names("scales zero_points"),
}
NORMS = _names(
    """batch_norm instance_norm layer_norm group_norm native_batch_norm native_layer_norm native_group_norm cudnn_batch_norm
    miopen_batch_norm _native_batch_norm_legit"""
)
# Device type → norms whose kernels accept a bfloat16 or float16 input with float32 weights (R9). For others the weights are cast as well.
# on Gaudi: every norm takes such an input with float32 weights, and its result has the input's dtype.
MIXED_NORM_KERNELS: dict[str, frozenset[str]] = dict.fromkeys(("cuda", "xpu", "xla"), _names("batch_norm instance_norm"))
# Device type → norms that torch runs there on that mixture too, with a float32 result: unlisted, they are left to torch (R7).
WIDENING_NORMS: dict[str, frozenset[str]] = {"xla": _names("layer_norm group_norm native_layer_norm native_group_norm")}

# R12. Fills and bounds: a finite scalar beyond the range of the tensor's dtype becomes that dtype's finite extreme.
FILLS = _names(
    """
    masked_fill where full_like new_full clamp clip clamp_min clamp_max pad constant_pad_nd threshold fill index_fill
    fill_diagonal hardtanh setitem
    """
)
# Arithmetic: with a scalar beyond the range of the low-precision dtype it is computed in float32, and the result saturates.
ARITHMETIC = _names("mul rmul imul multiply add radd sub rsub subtract div rdiv divide true_divide truediv rtruediv")
# Of those, the ones that are guarded so even where they are unlisted, for the idiom `(1 - mask) * finfo(float32).min`; and, under a policy
# of float16, whose largest number is 65504, for `scores - 1e9`.
GUARDED_ARITHMETIC = _names("mul rmul multiply")
GUARDED_IN_FLOAT16 = _names("add radd sub rsub subtract")
# Those that add a mask to scores, whose sum stays finite.
SUMS = _names("add radd iadd sub rsub isub subtract")
# Ops that take masks: operands that need no gradient are cast saturating. mul is one, as masks are multiplied by each other.
MASK_TAKERS = SUMS | _names("where baddbmm masked_fill index_put mul rmul multiply")
# Ops that take scores with a mask added: cast saturating, whether they need a gradient or not.
SCORE_TAKERS = _names("softmax log_softmax softmin logsumexp _softmax _log_softmax gumbel_softmax")
MASK_TAKERS_INPLACE = _names("add iadd sub isub subtract")

# Python functions of torch.nn.functional that only call the builtin of the same name: the builtin's wrapper casts.
FORWARDERS = _names(
    """batch_norm celu dropout elu group_norm hardswish layer_norm leaky_relu log_softmax mish relu relu6 selu sigmoid silu softmax
    tanh"""
)

# Python functions of torch that are structure and not ops: what they call is decided op by op (R8).
STRUCTURE = _names(
    "multi_head_attention_forward boolean_dispatch handle_torch_function backward register_hook register_post_accumulate_grad_hook"
)
# Names of numpy's that torch accepts for a parameter as well.
NUMPY_NAMES = {"input": ("x", "a", "x1"), "other": ("x2",), "dim": ("axis",), "keepdim": ("keepdims",)}
