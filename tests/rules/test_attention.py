"""R1, R2, R7, R8: attention by functions that torch compiles inside, and by classes of torch's that compute it themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import bias
from torch.nn.attention.flex_attention import flex_attention

import hmp
from oracle import BF16, F16, F32

POLICIES = {
    "bf16": (hmp.Policy("low", bf16={"scaled_dot_product_attention"}), BF16),
    "float16": (hmp.Policy("half", bf16={"scaled_dot_product_attention"}, dtype=F16), F16),
    "fp32": (hmp.Policy("wide", fp32={"scaled_dot_product_attention"}), F32),
    "a list with the products inside": (hmp.Policy("others", bf16={"matmul", "mul", "where", "softmax", "bmm"}), None),
    "none": (hmp.Policy("none"), None),
}
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def heads(*dtypes: torch.dtype) -> Heads:
    made = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    return tuple(x.to(dtype) for x, dtype in zip(made, dtypes, strict=True))  # type: ignore[return-value]


def jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x[0, 0, :3], x[0, 0, 3:9]], layout=torch.jagged).unflatten(-1, (2, 4)).transpose(1, 2)


def of_jagged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(jagged(query), jagged(key), jagged(value)).values()


def lower_right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query[:, :, :4], key, value, attn_mask=bias.causal_lower_right(4, 16))


CALLS: dict[str, Callable[..., torch.Tensor]] = {"jagged": of_jagged, "a causal bias": lower_right}


def check(call: Callable[..., torch.Tensor], listed: str, dtypes: tuple[torch.dtype, ...], *, watched: bool) -> None:
    policy, dtype = POLICIES[listed]
    given_heads = heads(*dtypes)
    # without a list the first input's (R7), where torch refuses the mixture
    by_hand = [x.to(dtype or dtypes[0]) for x in given_heads]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = call(*by_hand)
        with hmp.casts(policy):
            got = call(*given_heads)
            if watched:
                with hmp.record() as report:
                    seen = call(*given_heads)
                assert torch.equal(seen, got) and seen.dtype is got.dtype
                assert not [row for row in report.rows if row.op in ("matmul", "softmax", "where", "mul") and row.inputs]  # one op (R8)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@given(
    st.sampled_from(sorted(CALLS)), st.sampled_from(sorted(POLICIES)), st.tuples(*[st.sampled_from([F32, BF16, F16])] * 3), st.booleans()
)
def test_r1_attention_that_a_class_of_torchs_computes_follows_its_list_in_every_mixture(
    name: str, listed: str, dtypes: tuple[torch.dtype, ...], watched: bool
) -> None:
    check(CALLS[name], listed, dtypes, watched=watched)


@pytest.mark.slow  # it imports Dynamo
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")
@pytest.mark.parametrize("listed", POLICIES)
def test_r1_flex_attention_follows_scaled_dot_product_attention_and_is_one_op(listed: str) -> None:
    check(lambda *heads: flex_attention(*heads, lambda score, b, h, i, j: score * 2 + (i - j) / 4), listed, (F32, F32, F32), watched=True)


def test_r12_a_causal_bias_is_no_mask_of_numbers() -> None:
    """Its class has a shape and no values, in whatever dtype torch makes tensors."""
    torch.set_default_dtype(torch.float64)
    try:
        mask = bias.causal_lower_right(4, 16)
    finally:
        torch.set_default_dtype(F32)
    query, key, value = heads(F32, F32, F32)
    with hmp.casts("torch-cpu"), hmp.record():
        assert F.scaled_dot_product_attention(query[:, :, :4], key, value, attn_mask=mask).dtype is BF16


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_r3_attention_on_a_promote_list_gets_the_widest_dtype(first: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 4, 8).to(first), torch.randn(1, 2, 4, 8).to(torch.bfloat16 if first is torch.float32 else torch.float32)
    wanted = F.scaled_dot_product_attention(query.float(), key.float(), key.float())
    with hmp.casts(hmp.Policy("promote", promote={"scaled_dot_product_attention"})):
        assert torch.equal(F.scaled_dot_product_attention(query, key, key), wanted)
