"""What hmp knows of torch's ops, by id: one row has all that it knows of an op. Measured with torch 2.13.

A row adds its ops to the sets of its facts. Torch's own records can't replace them: its tags call half of the ops that draw random numbers
deterministic, its schemas call `contiguous` a view, and neither knows torch's Python functions.

Synonyms are written `mul=multiply`: the same arguments, the same result, the same facts. An unlisted op follows the first of its synonyms
that is listed. Functions of torch.special with the name of one in torch (special.softmax) are synonyms too and not repeated here.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ..torch_private import FLEX_TAKES_MIXTURES, TORCH

# --- names ----------------------------------------------------------------------------------------------------------------

# Dunder methods of Tensor, without underscores, whose op has another id: `__div__` is truediv. All others keep the name: `__add__` is add.
DUNDER_OPS: dict[str, str] = {"div": "truediv", "idiv": "itruediv", "rdiv": "rtruediv"}
# `__radd__` is the op radd and `__iadd__` is iadd; both follow add.
BINARY_DUNDERS = frozenset("add sub mul truediv floordiv mod pow matmul".split())
DUNDERS: tuple[str, ...] = tuple(f"__{prefix}{name}__" for name in sorted(BINARY_DUNDERS) for prefix in ("", "r", "i")) + tuple(
    f"__{name}__" for name in "div rdiv idiv neg pos abs eq ne lt le gt ge getitem setitem invert".split()
)
# Names of numpy's that torch accepts for a parameter as well.
NUMPY_NAMES = {"input": ("x", "a", "x1"), "other": ("x2",), "dim": ("axis",), "keepdim": ("keepdims",)}

# --- facts: what is in each set -------------------------------------------------------------------------------------------

# What it is.
# Its meaning is a dtype, or it only returns storage or metadata: never cast, whatever a list says.
DTYPE_OPS: set[str] = set()
# It computes nothing: its result is a view of its input wherever memory allows one. A list casts none of these, and `*` does not include
# them.
VIEWS: set[str] = set()
# `*` does not include these either: they compute no values to be rounded, create tensors or change the layout.
NOT_COMPUTED: set[str] = set()
# A Python function of torch that is structure and no op: what it calls is decided op by op.
STRUCTURE: set[str] = set()
# A list may have it even where torch lacks it: an op that is newer than the oldest torch that hmp runs with, or of Habana's compiler.
FOREIGN: set[str] = set()
# A Python function of torch.nn.functional that only calls the builtin of the same name: the builtin's wrapper casts.
FORWARDERS: set[str] = set()
# Its result never shares memory with an input, and it multiplies weights: casts of its inputs are shared by the uses of one call
# (core.copies). Of recurrent ops only the weights' casts are. Others cast each time, the plain way.
PRODUCTS: set[str] = set()
CELLS: set[str] = set()
RECURRENT: set[str] = set()
NORMS: set[str] = set()
# It draws random numbers. A failed call may have drawn some, so it is not retried in float32.
RANDOM: set[str] = set()
# It gives other values, some in another dtype, while a dispatch mode looks on: torch.autocast does not reach what its kernel calls then,
# or torch takes another routine of LAPACK.
CHANGED_BY_LISTENING: set[str] = set()

# Inputs of several dtypes.
# A join: a 0-dim tensor counts for the widest dtype, as in torch.
JOINS: set[str] = set()
# torch itself promotes the inputs to the widest dtype.
PROMOTED_BY_TORCH: set[str] = set()
# Of those: it computes a part in the narrower dtype, as in backward (smooth_l1_loss's on CUDA). XLA's kernels do so anywhere, raise on some
# mixtures, or take the first input's dtype.
PROMOTED_IN_PART: set[str] = set()
_has_xla = "torch_xla" in sys.modules or find_spec("torch_xla")  # which raises for a placeholder that somebody put there
PROMOTED_IN_PART_ON_XLA: set[str] = PROMOTED_IN_PART if _has_xla else set()
# It raises, in forward or backward: unlisted, its inputs become the dtype of the first castable one. Looked up by the op's own name.
MIXED_RAISES: set[str] = set()
# Of those: it accepts some mixtures, depending on shapes, so torch's op is tried first.
MIXED_SOMETIMES_RAISES: set[str] = set()
# Of those: only the kernel raises, and with fake and meta tensors, as compilers use, every mixture is accepted.
REFUSED_BY_KERNELS_ALONE: set[str] = set()
# Its forward promotes and its backward raises on some mixtures: its inputs are promoted before the call.
MIXED_BACKWARD_RAISES: set[str] = set()
# Its in-place form raises, in forward or backward: the other inputs become the first one's dtype. All other in-place ops accept mixtures.
MIXED_INPLACE_RAISES: set[str] = set()
# A norm whose kernel on CUDA, XPU and XLA accepts a bfloat16 or float16 input with float32 weights; elsewhere the weights are cast as well.
# on Gaudi: every norm takes such an input with float32 weights, and its result has the input's dtype.
MIXED_NORMS: set[str] = set()

# Kernels. Looked up by the op's name and those that it follows. Measured on CPU; for other devices, what torch's own tests expect.
# It has none for bfloat16 and float16, on any device. CUDA has float16 kernels for FFTs of power-of-two length, but they return complex32,
# which few ops accept. on Gaudi: an op without a low-precision kernel runs on the CPU or raises an error that names the dtype, as torch's
# own kernels do.
NO_LOW_KERNEL: set[str] = set()
NO_BFLOAT16_KERNEL: set[str] = set()
NO_FLOAT16_KERNEL: set[str] = set()
NO_LOW_KERNEL_ON_CPU: set[str] = set()
NO_FLOAT16_KERNEL_ON_CPU: set[str] = set()
NO_LOW_KERNEL_ON_CUDA: set[str] = set()
# It has a forward kernel and no backward kernel, on CPU and CUDA.
NO_LOW_BACKWARD_KERNEL: set[str] = set()
# It lacks a kernel for some arguments: the low-precision dtype is tried, and a failure is remembered.
KERNEL_BY_ARGUMENTS: set[str] = set()
# Its low-precision CPU kernel is slow where the processor has no instructions for the dtype: it computes in float32 there, and so does what
# follows it and writes into no input (sparse.mm). benchmarks/results/LOW_KERNELS.md has the times of all ops on the presets' low lists.
# Those that are not here, but for pow in float16, take less time by their own kernel than by casts around float32's.
SLOW_WITHOUT_INSTRUCTIONS: set[str] = set()
# Of the slow ones: torch.autocast computes it in low precision in part, and its result and its state are float32.
WIDE_UNDER_AUTOCAST: set[str] = set()

# Scalars and masks beyond the low-precision dtype.
# A fill or a bound: a finite scalar beyond the range of the tensor's dtype becomes that dtype's finite extreme.
FILLS: set[str] = set()
# With a scalar beyond the range of the low-precision dtype it is computed in float32, and the result saturates.
ARITHMETIC: set[str] = set()
# Arithmetic that does so even where it is unlisted, for the idiom `(1 - mask) * finfo(float32).min`.
GUARDED_ARITHMETIC: set[str] = set()
# Arithmetic that adds a mask to scores, and the sum stays finite. Unlisted ones do so in place; under a policy of float16, whose largest
# number is 65504, always, for `scores - 1e9`.
SUMS: set[str] = set()
# It takes masks: operands that need no gradient are cast finite (casting.cast_finite). mul is one, as masks are multiplied by each other.
MASK_TAKERS: set[str] = set()
# It takes scores with a mask added: cast finite, whether they need a gradient or not.
SCORE_TAKERS: set[str] = set()

# Op → arguments that it writes to, and the scales of quantization, which are float32 whatever the input is: they are never cast.
KEPT_ARGUMENTS: dict[str, frozenset[str]] = {}

# --- rows: each op once ---------------------------------------------------------------------------------------------------

SYNONYMS: dict[str, tuple[str, ...]] = {}
# ATen's name of an op → the ops that users call.
ATEN_SPELLINGS: dict[str, tuple[str, ...]] = {}
# Every op that is in a row.
OPS: set[str] = set()


def _row(ops: str, *facts: set[str], kept: str = "", follows: str = "", aten: str = "") -> None:
    """Add the ops to the sets of their facts.

    `kept` are arguments that are never cast. `follows` is an op that these follow while unlisted, with facts of their own: another Python
    function that computes the same, or a name of the same function object (torch.dsmm is torch.mm), which needs no facts. `aten` are names
    that ATen has for each of the ops, without those of overloads (`.Tensor_Scalar`).
    """
    for group in ops.split():
        synonyms = tuple(group.split("="))
        if not OPS.isdisjoint(synonyms):
            raise ValueError(f"expected one row for each op, got two of {group}; put all facts in one")
        OPS.update(synonyms)
        alike = (follows, *synonyms) if follows else synonyms
        for op in alike:
            SYNONYMS[op] = (*SYNONYMS.get(op, ()), *(other for other in alike if other != op))
        for fact in facts:
            fact.update(synonyms)
        for spelling in aten.split():
            ATEN_SPELLINGS[spelling] = (*ATEN_SPELLINGS.get(spelling, ()), synonyms[0])
        if kept:
            KEPT_ARGUMENTS.update(dict.fromkeys(synonyms, frozenset(kept.split())))


# fmt: off
# dtypes, storage and metadata
_row("""to type type_as copy result_type can_cast promote_types resize_as set set_ float half bfloat16 double int long short char byte bool
    cfloat cdouble chalf cpu cuda xpu hpu numpy item tolist data_ptr is_floating_point is_complex is_same_size is_nonzero numel dim size
    stride storage_offset requires_grad_ retain_grad share_memory_ pin_memory is_pinned is_shared is_contiguous is_set_to is_inference
    is_coalesced is_distributed record_stream apply""", DTYPE_OPS)
_row("map map2", DTYPE_OPS, MIXED_INPLACE_RAISES)
_row("hash_tensor", DTYPE_OPS, FOREIGN)  # of the bits; torch 2.9 and later
# getitem for another reason, too: Python treats a class whose `__getitem__` was ever set as a sequence from then on, and then
# torch.tensor([loss, loss]) calls len() on the 0-dim tensors.
_row("view_as expand_as reshape_as getitem", DTYPE_OPS, VIEWS)
_row("backward", DTYPE_OPS, STRUCTURE)
_row("boolean_dispatch handle_torch_function register_hook register_post_accumulate_grad_hook", STRUCTURE)

# views. F.unfold computes; Tensor.unfold, which is a view, is another op than the one that lists name
_row("""adjoint as_strided broadcast_to ccol_indices chunk col_indices conj crow_indices detach diagonal=linalg.diagonal dsplit expand
    flatten hsplit imag indices movedim=moveaxis narrow permute positive=pos ravel real reshape row_indices select slice_inverse split
    split_with_sizes squeeze t tensor_split transpose=swapaxes=swapdims unbind unflatten unsqueeze unsafe_chunk unsafe_split values view
    view_as_real vsplit atleast_1d atleast_2d atleast_3d broadcast_tensors""", VIEWS)
_row("meshgrid", VIEWS, MIXED_RAISES)
_row("view_as_complex", VIEWS, NO_BFLOAT16_KERNEL)

# new tensors, copies and layouts
_row("""clone empty_like zeros_like ones_like new_empty new_zeros new_ones as_masked_tensor masked_tensor sparse_coo_tensor
    sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor spdiags to_sparse to_sparse_csr
    to_sparse_csc to_sparse_bsr to_sparse_bsc to_dense to_mkldnn to_padded_tensor contiguous coalesce resolve_conj resolve_neg unfold
    sparse_mask flatten_dense_tensors unflatten_dense_tensors from_file range pad_sequence dequantize new_tensor new_empty_strided
    empty_permuted as_tensor tensor from_numpy frombuffer is_tensor is_storage numpy_T""", NOT_COMPUTED)
_row("full_like new_full", NOT_COMPUTED, FILLS)
_row("rand_like randn_like randint_like", NOT_COMPUTED, RANDOM)

# arithmetic
_row("mul=multiply rmul", PROMOTED_BY_TORCH, ARITHMETIC, GUARDED_ARITHMETIC, MASK_TAKERS)
_row("add radd sub=subtract rsub", PROMOTED_BY_TORCH, ARITHMETIC, SUMS, MASK_TAKERS)
_row("div=divide=true_divide=truediv", PROMOTED_BY_TORCH, PROMOTED_IN_PART_ON_XLA, ARITHMETIC)
_row("rtruediv", ARITHMETIC)
_row("addcmul addcdiv atan2=arctan2 pow rpow special.xlog1py", PROMOTED_BY_TORCH, PROMOTED_IN_PART)
_row("remainder=mod rmod maximum minimum max min logaddexp logaddexp2 xlogy special.xlogy", PROMOTED_BY_TORCH, PROMOTED_IN_PART_ON_XLA)
_row("""floor_divide=floordiv rfloordiv fmod float_power hypot copysign nextafter fmax fmin outer=ger kron dist diff linspace
    eq ne=not_equal lt=less le=less_equal gt=greater ge=greater_equal equal isin bucketize searchsorted
    logical_and logical_or logical_xor""", PROMOTED_BY_TORCH)
_row("igamma=special.gammainc igammac=special.gammaincc", PROMOTED_BY_TORCH, NO_LOW_KERNEL_ON_CUDA)
_row("lerp heaviside", MIXED_RAISES, MIXED_INPLACE_RAISES)
_row("isclose allclose cross linalg.cross cartesian_prod", MIXED_RAISES)
_row("complex", MIXED_RAISES, NO_BFLOAT16_KERNEL)
_row("polar quantile nanquantile", MIXED_RAISES, NO_LOW_KERNEL)
_row("histogram histogramdd", MIXED_RAISES, KERNEL_BY_ARGUMENTS)
_row("histc", NO_LOW_KERNEL_ON_CUDA)
_row("""abs=absolute neg=negative fix=trunc acos=arccos acosh=arccosh asin=arcsin asinh=arcsinh atan=arctan atanh=arctanh
    digamma=special.psi lgamma=special.gammaln mvlgamma=special.multigammaln erfinv=special.erfinv i0=special.i0 logsigmoid=log_sigmoid""")

# fills, bounds and indices
_row("clamp=clip clamp_min clamp_max", PROMOTED_BY_TORCH, PROMOTED_IN_PART_ON_XLA, FILLS)
_row("where", PROMOTED_BY_TORCH, PROMOTED_IN_PART_ON_XLA, FILLS, MASK_TAKERS)
_row("masked_fill", FILLS, MASK_TAKERS)
_row("pad constant_pad_nd threshold fill index_fill fill_diagonal hardtanh", FILLS)
_row("setitem", FILLS, NOT_COMPUTED, MIXED_INPLACE_RAISES)
_row("index_put", MASK_TAKERS, MIXED_RAISES, MIXED_INPLACE_RAISES, aten="_index_put_impl_")
_row("index_add index_copy index_reduce masked_scatter put scatter scatter_add scatter_reduce", MIXED_RAISES, MIXED_INPLACE_RAISES)
_row("cat=concat=concatenate", JOINS, PROMOTED_BY_TORCH, aten="_cat")
_row("stack", JOINS, PROMOTED_BY_TORCH, aten="_stack")
_row("hstack vstack=row_stack dstack column_stack block_diag", JOINS, PROMOTED_BY_TORCH)

# matrix products and convolutions
_row("linear", PRODUCTS, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, aten="mkldnn_linear")
_row("mm bmm", PRODUCTS, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES)
_row("dsmm=spmm", follows="mm")
_row("conv1d conv2d conv3d", PRODUCTS, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES,
     aten="_convolution convolution_overrideable mkldnn_convolution")
_row("conv_transpose1d conv_transpose2d conv_transpose3d", PRODUCTS, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES,
     aten="_convolution convolution_overrideable")
_row("matmul=linalg.matmul rmatmul", PRODUCTS, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, MIXED_SOMETIMES_RAISES, REFUSED_BY_KERNELS_ALONE)
_row("addmm addbmm", PRODUCTS, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, MIXED_INPLACE_RAISES)
_row("mv dot", PRODUCTS, MIXED_RAISES)
_row("bilinear", PRODUCTS, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, CHANGED_BY_LISTENING, aten="_trilinear")
_row("baddbmm", SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, MIXED_INPLACE_RAISES, MASK_TAKERS)
_row("addmv", MIXED_RAISES, MIXED_INPLACE_RAISES)
_row("addr", MIXED_BACKWARD_RAISES, MIXED_INPLACE_RAISES)
_row("einsum inner", SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, MIXED_SOMETIMES_RAISES)
_row("conv_tbc", SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, MIXED_SOMETIMES_RAISES, REFUSED_BY_KERNELS_ALONE)
_row("linear_cross_entropy", FOREIGN, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, MIXED_SOMETIMES_RAISES, REFUSED_BY_KERNELS_ALONE)
_row("tensordot chain_matmul linalg.multi_dot convolution", SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES)
_row("_convolution _addmm_activation cov corrcoef", SLOW_WITHOUT_INSTRUCTIONS)
_row("matrix_power=linalg.matrix_power", SLOW_WITHOUT_INSTRUCTIONS, KERNEL_BY_ARGUMENTS)
_row("vdot linalg.vecdot sparse.mm sparse.addmm hspmm", MIXED_RAISES)
_row("grouped_mm=_grouped_mm", FOREIGN, MIXED_RAISES)
_row("hsmm", follows="hspmm")
_row("smm sspaddmm", MIXED_RAISES, NO_LOW_KERNEL_ON_CPU)
_row("saddmm", follows="sspaddmm")
_row("sparse.sampled_addmm", MIXED_RAISES, NO_LOW_KERNEL)

# attention
_row("scaled_dot_product_attention", PRODUCTS, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, RANDOM,
     aten="_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _native_multi_head_attention")
_row("flex_attention", *(() if FLEX_TAKES_MIXTURES else (MIXED_RAISES,)), follows="scaled_dot_product_attention")
_row("multi_head_attention_forward", STRUCTURE, RANDOM)

# recurrent
_row("lstm", RECURRENT, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, MIXED_SOMETIMES_RAISES, REFUSED_BY_KERNELS_ALONE, RANDOM,
     aten="mkldnn_rnn_layer")
_row("gru", RECURRENT, SLOW_WITHOUT_INSTRUCTIONS, WIDE_UNDER_AUTOCAST, MIXED_RAISES, RANDOM)
_row("rnn_tanh rnn_relu", RECURRENT, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES, RANDOM)
_row("lstm_cell", CELLS, RECURRENT, SLOW_WITHOUT_INSTRUCTIONS, WIDE_UNDER_AUTOCAST, MIXED_RAISES, aten="_thnn_fused_lstm_cell")
_row("gru_cell", CELLS, RECURRENT, SLOW_WITHOUT_INSTRUCTIONS, WIDE_UNDER_AUTOCAST, MIXED_RAISES, aten="_thnn_fused_gru_cell")
_row("rnn_tanh_cell rnn_relu_cell", CELLS, RECURRENT, SLOW_WITHOUT_INSTRUCTIONS, MIXED_RAISES)

# norms
_row("batch_norm", NORMS, MIXED_NORMS, FORWARDERS,
     aten="_batch_norm_impl_index _native_batch_norm_legit native_batch_norm cudnn_batch_norm")
_row("instance_norm", NORMS, MIXED_NORMS)
_row("layer_norm", NORMS, FORWARDERS, aten="native_layer_norm")
_row("group_norm", NORMS, FORWARDERS, aten="native_group_norm")
_row("native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm", NORMS)
_row("batch_norm_update_stats batch_norm_gather_stats batch_norm_gather_stats_with_counts", kept="running_mean running_var")
_row("weight_norm", aten="_weight_norm")

# activations
_row("celu elu hardswish leaky_relu mish relu relu6 selu sigmoid=special.expit silu tanh", FORWARDERS)
_row("softmax", SCORE_TAKERS, FORWARDERS, aten="_softmax")
_row("log_softmax", SCORE_TAKERS, FORWARDERS, aten="_log_softmax")
_row("_softmax _log_softmax softmin logsumexp", SCORE_TAKERS)
_row("gumbel_softmax", SCORE_TAKERS, RANDOM)
_row("prelu", MIXED_RAISES)
_row("rrelu", RANDOM, NO_FLOAT16_KERNEL_ON_CPU)
_row("rrelu_with_noise", RANDOM, NO_FLOAT16_KERNEL_ON_CPU, kept="noise")

# random numbers
_row("dropout", RANDOM, FORWARDERS, aten="native_dropout _fused_dropout")
_row("dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout", RANDOM)
_row("bernoulli multinomial normal poisson", RANDOM)
_row("binomial", RANDOM, MIXED_RAISES, NO_LOW_KERNEL)
_row("_standard_gamma _sample_dirichlet", RANDOM, NO_LOW_KERNEL)

# pools, sampling and look-ups
_row("max_pool1d=max_pool1d_with_indices", aten="max_pool1d_with_indices")
_row("max_pool2d=max_pool2d_with_indices", aten="max_pool2d_with_indices")
_row("max_pool3d=max_pool3d_with_indices", aten="max_pool3d_with_indices")
_row("""adaptive_max_pool1d=adaptive_max_pool1d_with_indices adaptive_max_pool2d=adaptive_max_pool2d_with_indices
    adaptive_max_pool3d=adaptive_max_pool3d_with_indices""")
_row("fractional_max_pool2d fractional_max_pool3d", MIXED_RAISES, RANDOM)
_row("fractional_max_pool2d_with_indices", follows="fractional_max_pool2d")
_row("fractional_max_pool3d_with_indices", follows="fractional_max_pool3d")
_row("adaptive_avg_pool2d", aten="_adaptive_avg_pool2d")
_row("adaptive_avg_pool3d", aten="_adaptive_avg_pool3d")
_row("avg_pool3d lp_pool3d _upsample_bilinear2d_aa", NO_LOW_KERNEL_ON_CPU)
_row("grid_sample=grid_sampler", MIXED_RAISES, aten="grid_sampler_2d grid_sampler_3d")
_row("grid_sampler_2d grid_sampler_3d", MIXED_RAISES)
_row("interpolate=upsample", KERNEL_BY_ARGUMENTS, aten="""upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d""")
_row("embedding_bag", MIXED_RAISES, aten="_embedding_bag")

# losses and distances
_row("pairwise_distance", PROMOTED_BY_TORCH)
_row("l1_loss", PROMOTED_BY_TORCH, PROMOTED_IN_PART)  # the sum of its weights
_row("smooth_l1_loss", PROMOTED_BY_TORCH, PROMOTED_IN_PART, aten="smooth_l1_loss_forward")
_row("mse_loss", PROMOTED_BY_TORCH if TORCH >= (2, 13) else MIXED_BACKWARD_RAISES, PROMOTED_IN_PART)  # as l1_loss
_row("huber_loss binary_cross_entropy", MIXED_RAISES)
_row("nll_loss", MIXED_RAISES, aten="nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward")
_row("cross_entropy", MIXED_RAISES, MIXED_SOMETIMES_RAISES, REFUSED_BY_KERNELS_ALONE, aten="cross_entropy_loss")
_row("multi_margin_loss", MIXED_RAISES, NO_LOW_KERNEL_ON_CPU)
_row("multilabel_margin_loss", NO_LOW_KERNEL_ON_CPU, aten="multilabel_margin_loss_forward")
_row("ctc_loss", NO_LOW_KERNEL, aten="_ctc_loss")
_row("pdist", NO_LOW_KERNEL, aten="_pdist_forward")
_row("cdist", MIXED_RAISES, MIXED_SOMETIMES_RAISES, NO_LOW_KERNEL, aten="_cdist_forward")

# linear algebra
_row("""cholesky linalg.cholesky linalg.cholesky_ex cholesky_inverse geqrf logdet slogdet=linalg.slogdet linalg.eig linalg.eigvals
    inverse=linalg.inv linalg.inv_ex linalg.ldl_factor linalg.ldl_factor_ex lu linalg.lu linalg.lu_factor linalg.lu_factor_ex
    qr linalg.qr svd linalg.tensorinv linalg.vander matrix_exp""", NO_LOW_KERNEL)
_row("linalg.matrix_sqrth", FOREIGN, NO_LOW_KERNEL)
_row("linalg.det=det", NO_LOW_KERNEL, aten="_linalg_det")
_row("linalg.eigh", NO_LOW_KERNEL, aten="_linalg_eigh")
_row("linalg.svd", NO_LOW_KERNEL, aten="_linalg_svd")
_row("linalg.solve_ex", NO_LOW_KERNEL, MIXED_RAISES, aten="_linalg_solve_ex")
_row("""cholesky_solve lu_solve linalg.lu_solve triangular_solve linalg.solve linalg.solve_triangular linalg.tensorsolve linalg.ldl_solve
    ormqr orgqr=linalg.householder_product""", NO_LOW_KERNEL, MIXED_RAISES)
_row("linalg.lstsq", NO_LOW_KERNEL, MIXED_RAISES, CHANGED_BY_LISTENING)
_row("linalg.cond linalg.eigvalsh linalg.matrix_rank pinverse=linalg.pinv linalg.svdvals", NO_LOW_KERNEL, CHANGED_BY_LISTENING)
_row("norm linalg.norm linalg.matrix_norm", KERNEL_BY_ARGUMENTS, CHANGED_BY_LISTENING)
_row("nuclear_norm", CHANGED_BY_LISTENING)
_row("svd_lowrank pca_lowrank", NO_LOW_KERNEL, MIXED_RAISES, RANDOM)
_row("lobpcg", NO_LOW_KERNEL, RANDOM)
_row("lu_unpack", NO_LOW_KERNEL_ON_CUDA)
if TORCH < (2, 13):
    _row("trace", NO_LOW_KERNEL_ON_CPU)

# Fourier transforms and special functions
_row("stft", PROMOTED_BY_TORCH, NO_LOW_KERNEL)
_row("istft", PROMOTED_BY_TORCH)
_row("""fft.fft fft.fft2 fft.fftn fft.hfft fft.hfft2 fft.hfftn fft.ifft fft.ifft2 fft.ifftn fft.ihfft fft.ihfft2 fft.ihfftn fft.irfft
    fft.irfft2 fft.irfftn fft.rfft fft.rfft2 fft.rfftn special.airy_ai special.bessel_j0 special.bessel_j1 special.bessel_y0
    special.bessel_y1 special.erfcx special.log_ndtr special.modified_bessel_i0 special.modified_bessel_i1 special.modified_bessel_k0
    special.modified_bessel_k1 special.ndtri special.scaled_modified_bessel_k0 special.scaled_modified_bessel_k1
    special.spherical_bessel_j0""", NO_LOW_KERNEL)
_row("""special.chebyshev_polynomial_t special.chebyshev_polynomial_u special.chebyshev_polynomial_v special.chebyshev_polynomial_w
    special.shifted_chebyshev_polynomial_t special.shifted_chebyshev_polynomial_u special.shifted_chebyshev_polynomial_v
    special.shifted_chebyshev_polynomial_w special.hermite_polynomial_h special.hermite_polynomial_he special.laguerre_polynomial_l
    special.legendre_polynomial_p special.zeta""", PROMOTED_BY_TORCH, NO_LOW_KERNEL)
if TORCH < (2, 15):
    _row("special.i1 special.i1e", NO_LOW_BACKWARD_KERNEL)

# other releases of torch, backward, Habana's compiler
_row("""embedding_bag_sum_fwd embedding_bag_sum_bwd embedding_bag_sum embedding_bag_preproc kv_reduce_sum sparse_segment_sum fused_norm
    fused_clip_norm optimizer_adamw optimizer_sgd optimizer_lamb custom_foreach_add_ roi_align nms batched_nms deform_conv2d gels symeig
    eig lstsq solve matrix_rank cumulative_max irfft rfft ifft stft_legacy sum_to_size_ lu_unpack_ bucketize_ pdist_ gru_impl frac_gradient
    addcdiv_legacy triangular_solve_legacy max_unpool_2d fused_dropout linalg.polar scaled_mm _scaled_mm rms_norm fused_rms_norm
    _fused_rms_norm swiglu fused_sdpa sdpa_recomp_fwd sdpa_recomp_bwd rotary_pos_embedding rope optimizer_lars optimizer_ema cast
    cast_f32_to_bf16 cast_bf16_to_f32 hpu_cast permute_copy_hpu instance_norm_backward as_strided_lazy strided_view slice_insert
    dropout_backward""", FOREIGN)

# quantization; the learnable ones lack a backward kernel
_row("fake_quantize_per_channel_affine fake_quantize_per_tensor_affine", kept="scale zero_point")
_row("_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine", NO_FLOAT16_KERNEL, kept="scale zero_point")
_row("quantize_per_tensor", NOT_COMPUTED, NO_LOW_KERNEL, kept="scale zero_point")
_row("quantize_per_tensor_dynamic", NOT_COMPUTED, NO_LOW_KERNEL)
_row("quantize_per_channel", NOT_COMPUTED, NO_LOW_KERNEL, kept="scales zero_points")
_row("choose_qparams_optimized", NO_LOW_KERNEL)
_row("fused_moving_avg_obs_fake_quant", NO_LOW_KERNEL, kept="observer_on fake_quant_on running_min running_max scale zero_point")
# fmt: on

# --- what follows from the rows -------------------------------------------------------------------------------------------

# On a promote list these need no wrapper.
PROMOTED_WHOLLY = PROMOTED_BY_TORCH - PROMOTED_IN_PART
# (device type or "*" for any, dtypes, ops without a kernel there)
NO_KERNEL = (
    ("*", "bfloat16 float16", NO_LOW_KERNEL),
    ("*", "bfloat16", NO_BFLOAT16_KERNEL),
    ("*", "float16", NO_FLOAT16_KERNEL),
    ("cpu", "bfloat16 float16", NO_LOW_KERNEL_ON_CPU),
    ("cpu", "float16", NO_FLOAT16_KERNEL_ON_CPU),
    ("cuda", "bfloat16 float16", NO_LOW_KERNEL_ON_CUDA),
)
# The same for ops with a forward kernel, where a gradient is needed.
NO_BACKWARD_KERNEL = tuple((device, "bfloat16 float16", NO_LOW_BACKWARD_KERNEL) for device in ("cpu", "cuda"))
WITHOUT_KERNEL = frozenset().union(*(ops for _, _, ops in (*NO_KERNEL, *NO_BACKWARD_KERNEL)))
# Device type → norms.
MIXED_NORM_KERNELS = dict.fromkeys(("cuda", "xpu", "xla"), MIXED_NORMS)
