"""R12: scalars and masks beyond a dtype's range stay finite; infinities stay infinities."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from autocast_kit import HERE
from low_kernels_kit import as_computed
from oracle import BF16, F16, F32, MAX, assert_identical, assert_same, outcome, saturated
from strategies import Leaf

LOWEST = torch.finfo(F32).min
HUGE = [LOWEST, -LOWEST, 1e39, -1e300, 2**130, -(2**130)]  # beyond bfloat16, most of them beyond float32
WIDE = [*HUGE, -1e9, 65505.0, 70000, -1e5]  # beyond float16
beyond = st.sampled_from([(BF16, s) for s in HUGE] + [(F16, s) for s in WIDE])
LISTS = {
    "habana": "habana",
    "nothing": hmp.Policy(name="nothing", bf16=frozenset(), fp32=frozenset(), promote=frozenset()),
    "fills in bf16": hmp.Policy(
        name="fills",
        bf16=frozenset("masked_fill where full_like clamp clip clamp_min clamp_max pad threshold index_fill".split()),
        fp32=frozenset(),
        promote=frozenset(),
    ),
}
policies = st.sampled_from(sorted(LISTS))
MASK = torch.tensor([True, False, True, False])
ROWS = torch.tensor([0, 2])


def extreme(scalar: float, dtype: torch.dtype) -> float:
    """The dtype's finite extreme on the scalar's side."""
    return math.copysign(MAX[dtype], scalar)


def assigned(index):
    def run(x, s):
        written = x.clone()
        written[index] = s
        return written

    return run


FILLS = {
    "masked_fill": lambda x, s: x.masked_fill(MASK, s),
    "torch.masked_fill": lambda x, s: torch.masked_fill(x, mask=MASK, value=s),
    "masked_fill_": lambda x, s: x.clone().masked_fill_(MASK, s),
    "where": lambda x, s: torch.where(MASK, s, x),
    "where reversed": lambda x, s: torch.where(~MASK, x, s),
    "Tensor.where": lambda x, s: x.where(~MASK, s),
    "full_like": lambda x, s: torch.full_like(x, s),
    "fill_": lambda x, s: x.clone().fill_(s),
    "index_fill": lambda x, s: x.index_fill(0, ROWS, s),
    "pad": lambda x, s: F.pad(x, (1, 2), value=s),
    "pad by position": lambda x, s: F.pad(x, (1, 2), "constant", s),
    "threshold": lambda x, s: F.threshold(x, 0.0, s),
    "clamp(min, max)": lambda x, s: torch.clamp(x, min(s, 0.5), max(s, 0.5)),
    "x.clamp(min=)": lambda x, s: x.clamp(min=s),
    "clamp_max": lambda x, s: torch.clamp_max(x, s),
    "clip": lambda x, s: torch.clip(x, max=s),
    "clamp_": lambda x, s: x.clone().clamp_(min=s),
    "x[mask] =": assigned(MASK),
    "x[rows] =": assigned(ROWS),
    "x[1] =": assigned(1),
    "x[:] =": assigned(slice(None)),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FILLS)
@given(case=beyond, policy=policies, seed=st.integers(0, 99))
def test_r12_a_finite_scalar_in_a_fill_or_a_bound_becomes_the_finite_extreme(name, case, policy, seed) -> None:
    dtype, scalar = case
    leaf = Leaf((4,), dtype, grad=True, seed=seed)
    expected = outcome(FILLS[name], [leaf.build(), extreme(scalar, dtype)])
    with hmp.casts(LISTS[policy]):
        got = outcome(FILLS[name], [leaf.build(), scalar])
    if policy == "fills in bf16" and dtype is F16:
        assert got.error is None and bool(torch.isfinite(got.results[0]).all())  # cast to bf16 first
        return
    assert_same(got, expected)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FILLS)
@given(dtype=st.sampled_from([BF16, F16, F32]), scalar=st.sampled_from([math.inf, -math.inf, 1.5, -3, 0]))
def test_r12_infinities_and_what_fits_stay_as_they_are(name, dtype, scalar) -> None:
    leaf = Leaf((4,), dtype, seed=1)
    expected = outcome(FILLS[name], [leaf.build(), scalar])
    with hmp.casts("habana"):
        got = outcome(FILLS[name], [leaf.build(), scalar])
    assert_same(got, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["masked_fill", "where", "full_like", "clamp_max", "pad", "threshold"])
def test_r12_a_listed_fill_saturates_for_the_dtype_that_it_casts_to(name: str) -> None:
    """A float32 tensor takes finfo(float32).min; once it is cast to bf16 the scalar has to follow."""
    leaf = Leaf((4,), F32, grad=False, seed=2)
    expected = outcome(lambda x, s: FILLS[name](x.to(BF16), s), [leaf.build(), extreme(LOWEST, BF16)])
    with hmp.casts(LISTS["fills in bf16"]):
        got = outcome(FILLS[name], [leaf.build(), LOWEST])
    assert got.results[0].dtype is BF16
    assert_same(got, expected)


def test_r12_integers_keep_torchs_error() -> None:
    with hmp.casts("habana"), pytest.raises(RuntimeError, match="without overflow"):
        torch.zeros(4, dtype=torch.int8).masked_fill(MASK, 1000)


# Arithmetic with a scalar beyond the low dtype computes in float32 and saturates.
PRODUCTS = {
    "x * s": operator.mul,
    "s * x": lambda x, s: s * x,
    "torch.mul": lambda x, s: torch.mul(x, s),
    "x.mul": lambda x, s: x.mul(s),
    "multiply": lambda x, s: torch.multiply(x, s),
}
ARITHMETIC = {
    "x + s": (operator.add, "add"),
    "s - x": (lambda x, s: s - x, "rsub"),
    "x - s": (operator.sub, "sub"),
    "torch.add": (lambda x, s: torch.add(x, s), "add"),
    "x.sub": (lambda x, s: x.sub(s), "sub"),
    "x / s": (operator.truediv, "truediv"),
}
small = st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5, 0.25, math.inf, -math.inf]), min_size=1, max_size=4)


def in_float32(call, x: torch.Tensor, scalar: float, low: torch.dtype) -> torch.Tensor:
    return saturated(call(x.to(F32), scalar), low)


@pytest.mark.parametrize("name", PRODUCTS)
@given(values=small, start=st.sampled_from([F32, BF16, F16]), scalar=st.sampled_from([LOWEST, -LOWEST, 3.4e38]))
def test_r12_a_product_with_a_scalar_beyond_bf16_saturates(name, values, start, scalar) -> None:
    x = torch.tensor(values, dtype=start)
    want = in_float32(PRODUCTS[name], x, scalar, BF16)
    with hmp.casts("habana"):
        got = PRODUCTS[name](x, scalar)
    assert_identical(got, want, "the product")


@pytest.mark.parametrize("policy", ["unlisted", "promoted"])
@given(values=small, dtype=st.sampled_from([BF16, F16]))
def test_r12_a_product_saturates_whether_mul_is_listed_or_not(policy, values, dtype) -> None:
    x = torch.tensor(values, dtype=dtype)
    want = in_float32(operator.mul, x, LOWEST, dtype)
    promote = frozenset({"mul"} if policy == "promoted" else ())
    with hmp.casts(hmp.Policy(name="mul", bf16=frozenset(), fp32=frozenset(), promote=promote)):
        assert_identical(x * LOWEST, want, "the product")
        assert_identical(torch.mul(x, LOWEST), want, "the product")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ARITHMETIC)
@given(values=small, start=st.sampled_from([F32, BF16, F16]), scalar=st.sampled_from([LOWEST, -LOWEST, 3.4e38]))
def test_r12_listed_arithmetic_with_a_scalar_beyond_bf16_saturates(name, values, start, scalar) -> None:
    call, op = ARITHMETIC[name]
    x = torch.tensor(values, dtype=start)
    want = in_float32(call, x, scalar, BF16)
    with hmp.casts(hmp.Policy(name="r12", bf16=frozenset({op}), fp32=frozenset(), promote=frozenset())):
        assert_identical(call(x, scalar), want, "the result")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("where", ["elsewhere", "the first input"])
def test_r12_a_product_that_goes_to_out_saturates(where: str, dtype: torch.dtype) -> None:
    """R6: the op runs under its rule, this one too; a float32 first input needs no help and is never narrowed (R5)."""
    x = torch.tensor([0.0, 1.0, -0.5], dtype=dtype)
    low = dtype if where == "the first input" else BF16
    want = in_float32(operator.mul, x, LOWEST, low).to(dtype)
    out = x if where == "the first input" else torch.empty(3, dtype=dtype)
    with hmp.casts("habana"):
        torch.mul(x, LOWEST, out=out)
    assert_identical(out, want, "out")


@pytest.mark.parametrize("name", ["masked_fill", "where", "clamp_max", "x[mask] =", "full_like"])
def test_r12_a_numpy_float_is_a_scalar_too(name: str) -> None:
    """numpy.float64 is a Python float; masks are often built from numpy.finfo."""
    leaf = Leaf((4,), F16, seed=2)
    expected = outcome(FILLS[name], [leaf.build(), -MAX[F16]])
    with hmp.casts("habana"):
        got = outcome(FILLS[name], [leaf.build(), np.float64(-1e9)])
        product = torch.ones(2) * np.float64(LOWEST)
    assert_same(got, expected)
    assert_identical(product, torch.full((2,), -MAX[BF16], dtype=BF16), "the product")


def test_r12_the_gradient_of_a_saturated_product_is_finite_in_the_leafs_dtype() -> None:
    x = torch.tensor([0.0, 0.5], requires_grad=True)
    with hmp.casts("habana"):
        (x * LOWEST).sum().backward()
    assert x.grad.dtype is F32 and bool(torch.isfinite(x.grad).all())


KEEP = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])  # the second row is masked altogether


ADDED = {
    "scores + mask": (lambda s, m: s + m, "add"),
    "mask + scores": (lambda s, m: m + s, "add"),
    "torch.add": (lambda s, m: torch.add(s, m), "add"),
    "sub": (lambda s, m: s - m, "sub"),
    "where": (lambda s, m: torch.where(KEEP > 0, s, m), "where"),
    "baddbmm": (lambda s, m: torch.baddbmm(m[None], s[None], torch.eye(3, dtype=s.dtype)[None]), "baddbmm"),
    "baddbmm_": (lambda s, m: s[None].clone().baddbmm_(m[None], torch.eye(3, dtype=s.dtype)[None]), "baddbmm"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("sign", [1, -1])
def test_r12_a_mask_tensor_of_the_lowest_float32_stays_finite(name: str, sign: int) -> None:
    """No operand that needs no gradient overflows on its way to the low dtype (trap D2)."""
    call, op = ADDED[name]
    scores, mask = torch.randn(2, 3).to(BF16), torch.where(KEEP > 0, 0.0, sign * LOWEST)
    want = call(scores, saturated(mask, BF16)).clamp(-MAX[BF16], MAX[BF16])
    with hmp.casts(hmp.Policy(name="r12", bf16=frozenset({op}), fp32=frozenset(), promote=frozenset())):
        got = call(scores, mask)
    assert_identical(got, want, "the masked scores")


def test_r12_infinities_in_a_mask_stay_infinities() -> None:
    mask = torch.tensor([0.0, -math.inf, LOWEST])
    with hmp.casts(hmp.Policy(name="r12", bf16=frozenset({"add"}), fp32=frozenset(), promote=frozenset())):
        got = torch.zeros(3) + mask
    assert got.tolist() == [0.0, -math.inf, -MAX[BF16]]


def test_r12_an_operand_that_needs_a_gradient_gets_the_plain_cast() -> None:
    x = torch.tensor([1.0, LOWEST], requires_grad=True)
    with hmp.casts(hmp.Policy(name="r12", bf16=frozenset({"add"}), fp32=frozenset(), promote=frozenset())):
        got = outcome(lambda a: a + torch.ones(2), [x])
    assert_same(got, outcome(lambda a: a.to(BF16) + torch.ones(2, dtype=BF16), [x]))


ATTENTION_POLICIES = {
    "unlisted": LISTS["nothing"],
    "habana": hmp.Policy.load("habana"),
    "bf16": hmp.Policy("low", bf16={"scaled_dot_product_attention"}),
    "promote": hmp.Policy("promote", promote={"scaled_dot_product_attention"}),
    "fp32": hmp.Policy("wide", fp32={"scaled_dot_product_attention"}),
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("policy", ATTENTION_POLICIES)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("given", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("fill", [-math.inf, LOWEST, -1e4])
def test_r12_the_mask_of_scaled_dot_product_attention_becomes_the_querys_dtype(
    fill: float, given: torch.dtype, learned: bool, policy: str
) -> None:
    """Saturating: a finite value stays finite, an infinity an infinity; a learned bias has a gradient in its own dtype."""
    q, k, v = (torch.randn(1, 2, 3, 4).to(BF16) for _ in range(3))
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), fill)
    mask = mask.clamp(min=torch.finfo(given).min) if math.isfinite(fill) else mask
    mask = mask.to(given)
    dtype = F32 if policy == "fp32" else BF16
    limit = torch.finfo(dtype).max
    fitting = torch.where(mask.isinf(), mask, mask.float().clamp(-limit, limit)).to(dtype)
    # torch chooses a kernel by whether the mask needs a gradient
    attention = as_computed(F.scaled_dot_product_attention)
    want = attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=fitting.requires_grad_(learned)).detach()
    results = []
    with hmp.casts(ATTENTION_POLICIES[policy]):
        for call in (
            lambda m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
            lambda m: F.scaled_dot_product_attention(q, k, v, m),
            lambda m: F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m),
        ):
            leaf = mask.clone().requires_grad_(learned)
            results.append(call(leaf))
            if learned:
                results[-1].float().square().sum().backward()
                assert leaf.grad is not None
                assert leaf.grad.dtype is given
                assert leaf.grad.isfinite().all()
    for got in results:
        assert_identical(got.detach(), want, "the attention")


@pytest.mark.parametrize("given", [F32, BF16], ids=str)
def test_r12_a_learned_bias_has_the_results_and_gradients_that_it_has_under_autocast(given: torch.dtype) -> None:
    """T5 and Swin add one."""
    tensors = [torch.randn(1, 2, 3, 4) for _ in range(3)] + [torch.randn(1, 2, 3, 3).to(given)]
    found = []
    for region in (torch.autocast(HERE, dtype=BF16), hmp.casts(hmp.Policy.load("autocast").replace(dtype=BF16))):
        leaves = [t.clone().requires_grad_() for t in tensors]
        with region:
            result = F.scaled_dot_product_attention(*leaves)
        found.append((result, torch.autograd.grad(result.float().square().sum(), leaves)))
    assert_identical(found[1][0], found[0][0], "the attention")
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        assert_identical(ours, theirs, "a gradient")


def test_r12_a_bool_mask_stays_one_and_a_float64_one_leaves_the_op_to_torch() -> None:
    q = torch.randn(1, 1, 3, 4)
    keep = torch.ones(3, 3).tril().bool()
    want = F.scaled_dot_product_attention(q.to(BF16), q.to(BF16), q.to(BF16), attn_mask=keep)
    with hmp.casts(ATTENTION_POLICIES["bf16"]):
        assert_identical(F.scaled_dot_product_attention(q, q, q, attn_mask=keep), want, "the attention")
        with pytest.raises(RuntimeError, match="attn_mask"):
            F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(3, 3, dtype=torch.float64))


def test_r12_what_has_no_values_is_cast_and_not_clamped():
    """torch's clamp on the meta device is Python that calls torch.where: each would call the other without end."""
    x = torch.ones(3, device="meta")
    with hmp.casts(hmp.Policy(bf16={"where"})):
        assert torch.where(x > 0, x, torch.full((3,), -3.4e38, device="meta")).dtype is BF16
        assert torch.clamp(x, min=-3.4e38).dtype is torch.float32
