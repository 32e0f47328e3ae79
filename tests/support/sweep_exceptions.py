"""Where the oracle of single calls and hmp may differ, named one by one, each with its reason."""

from __future__ import annotations

# The release of torch that the table was made with: on others an entry may have nothing to except.
TORCH = "2.13"

# By op and what differs: differences that are no defects of hmp, in mixtures of dtypes, and of what no patch reaches.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("diff", "dtype"): "with n=0 torch hands the input back and looks at nothing else, and its promotion is left to torch",
    ("diff", "raises"): "with n=0 torch copies the input into out and wants its dtype: its own semantics for a mixture (R7)",
    ("slice_scatter", "raises"): "unlisted, and torch accepts the mixture: what it says of an out of another dtype stands (R7)",
    ("where", "raises"): "a float32 number of no dimensions beside bfloat16: what torch says of a float32 out stands (R7)",
    **{
        ("native_layer_norm", what): "a float32 bias without a weight has no kernel in backward; hmp adds a weight of ones, as float32"
        for what in ("dtype", "values", "gradient")
    },
    ("torch._scaled_mm", "raises"): "op_db's function makes the scales by ops that lists cast",
    ("max_pool2d_with_indices_backward", "raises"): "op_db's function calls ops that lists cast, and then torch.ops.aten, out of reach",
}

# Entries of op_db that plain torch runs on no CPU, whatever the dtype.
NOT_ON_CPU = frozenset(
    """jiterator_unary jiterator_binary jiterator_4inputs_with_extra_args jiterator_binary_return_by_ref jiterator_2inputs_2outputs
    torch.ops.aten._flash_attention_forward torch.ops.aten._efficient_attention_forward""".split()
)
# Private functions of torch and calls of its dispatcher (torch.ops), some behind a public name of op_db: no ops in the sense of
# rules.md and out of a patch's reach. Under every policy they do what plain torch does.
OUT_OF_REACH = NOT_ON_CPU | frozenset(
    """_softmax_backward_data _native_batch_norm_legit _batch_norm_with_update _upsample_bilinear2d_aa max_pool2d_with_indices_backward
    torch._scaled_mm_v2 torch._scaled_mm slice _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _chunk_cat native_dropout_backward _segment_reduce""".split()
)
# Results that hold whatever was in memory: dtype and shape are all there is to compare.
UNINITIALISED = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_".split())
# R8: torch's code that is structure and no op. What it calls is decided op by op, so float32's values are asked for, roughly.
STRUCTURE = frozenset({"nn.functional.multi_head_attention_forward"})
# Ops whose last bits hang on where in memory a library finds its arguments (LAPACK; torch 2.14's sums of float16 in the gradient of
# sparse.mm(reduce="amax")): the difference that is allowed, of the largest value.
ROUGH = {"linalg.lstsq": 1e-5, "sparse.mm": 1e-3}
