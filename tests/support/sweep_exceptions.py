"""Where the sweep's oracle and hmp may differ, named one by one, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# The release of torch that the table was made with: on others an entry may have nothing to except.
TORCH = "2.13"


@dataclass(frozen=True)
class Exempt:
    """Findings of one op that are no defects of hmp; the fields name all that it covers, separated by commas."""

    op: str
    what: str
    variants: str
    policies: str
    mixtures: str
    reason: str

    def covers(self, finding: Any) -> bool:
        return (
            self.op == finding.op
            and finding.what in _words(self.what)
            and finding.variant in _words(self.variants)
            and finding.policy in _words(self.policies)
            and finding.mixture in _words(self.mixtures)
        )

    def __str__(self) -> str:
        return f"{self.op} [{self.variants}] under {self.policies}, {self.mixtures}: {self.what}. {self.reason}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


EXCEPTIONS: tuple[Exempt, ...] = (
    Exempt(
        "diff",
        "dtype",
        "function, keywords, method",
        "habana",
        "first bf16",
        "With n=0 torch hands the input back and looks at nothing else; diff is one of the ops whose promotion is left to torch.",
    ),
    Exempt(
        "diff",
        "raises",
        "out",
        "habana, torch-cpu",
        "first bf16 into fp32",
        "With n=0 torch copies the input into out and wants its dtype: torch's own semantics for a mixture that it accepts (R7).",
    ),
    Exempt(
        "slice_scatter",
        "raises",
        "out",
        "habana, torch-cpu",
        "first bf16 into fp32",
        "Unlisted, and torch accepts the mixture without out=: what it says of an out of another dtype stands (R7).",
    ),
    Exempt(
        "where",
        "raises",
        "out",
        "habana, torch-cpu",
        "first fp32 into fp32",
        "A float32 number of no dimensions beside bfloat16: torch accepts the mixture, and what it says of a float32 out stands (R7).",
    ),
    Exempt(
        "native_layer_norm",
        "dtype, values, gradient",
        "function, keywords",
        "habana, torch-cpu, random A, random B",
        "first bf16",
        "A float32 bias without a weight has no kernel in backward; hmp adds a weight of ones: mean and rstd are float32.",
    ),
    *(
        Exempt(
            "max_pool2d_with_indices_backward",
            "raises",
            "function",
            policy,
            mixture,
            "op_db's function calls ones_like and max_pool2d, which the lists cast, and then torch.ops.aten, which no patch sees.",
        )
        for policy, mixture in (("random A", "fp32"), ("random B", "bf16"))
    ),
)

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
# Ops whose last bits hang on where in memory LAPACK finds its arguments: the difference that is allowed, of the largest value.
ROUGH = {"linalg.lstsq": 1e-5}


def unexplained(findings: Iterable[Any]) -> list[Any]:
    """The findings that no entry covers."""
    return [f for f in findings if not any(entry.covers(f) for entry in EXCEPTIONS)]
