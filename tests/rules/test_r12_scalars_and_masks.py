"""R12: scalars and masks beyond a dtype's range stay finite; infinities stay infinities."""

from __future__ import annotations

import itertools
import math
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import hmp
from low_kernels_kit import as_computed
from oracle import BF16, F16, F32, MAX, assert_identical, assert_same, outcome, saturated
from strategies import Leaf
from trap_kit import policy

LOWEST = torch.finfo(F32).min
HUGE = [LOWEST, -LOWEST, 1e39, -1e300, 2**130, -(2**130)]  # beyond bfloat16, most of them beyond float32
WIDE = [*HUGE, -1e9, 65505.0, 70000, -1e5]  # beyond float16
beyond = st.sampled_from([(BF16, s) for s in HUGE] + [(F16, s) for s in WIDE])
LISTS = {
    "habana": "habana",
    "nothing": policy(),
    "fills in bf16": policy(bf16="masked_fill where full_like clamp clip clamp_min clamp_max pad threshold index_fill".split()),
}
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


@settings(max_examples=4 * settings.default.max_examples)
@given(
    name=st.sampled_from(sorted(FILLS)),
    case=beyond,
    kind=st.sampled_from([float, np.float64]),
    lists=st.sampled_from(sorted(LISTS)),
    seed=st.integers(0, 99),
)
def test_r12_a_finite_scalar_in_a_fill_or_a_bound_becomes_the_finite_extreme(name, case, kind, lists, seed) -> None:
    """numpy.float64 is a Python float; masks are often built from numpy.finfo."""
    dtype, scalar = case
    leaf = Leaf((4,), dtype, grad=True, seed=seed)
    expected = outcome(FILLS[name], [leaf.build(), extreme(scalar, dtype)])
    with hmp.casts(LISTS[lists]):
        got = outcome(FILLS[name], [leaf.build(), kind(scalar)])
    if lists == "fills in bf16" and dtype is F16:
        assert got.error is None and bool(torch.isfinite(got.results[0]).all())  # cast to bf16 first
        return
    assert_same(got, expected)


def test_r12_infinities_and_what_fits_stay_as_they_are() -> None:
    cases = [(name, dtype, s) for name in FILLS for dtype in (BF16, F16, F32) for s in (math.inf, -math.inf, 1.5, -3)]
    leaf = {dtype: Leaf((4,), dtype, seed=1) for dtype in (BF16, F16, F32)}
    expected = [outcome(FILLS[name], [leaf[dtype].build(), s]) for name, dtype, s in cases]
    with hmp.casts("habana"):
        for (name, dtype, s), want in zip(cases, expected, strict=True):
            assert_same(outcome(FILLS[name], [leaf[dtype].build(), s]), want)


def test_r12_a_listed_fill_saturates_for_the_dtype_that_it_casts_to() -> None:
    """A float32 tensor takes finfo(float32).min; once it is cast to bf16 the scalar has to follow."""
    leaf = Leaf((4,), F32, grad=False, seed=2)
    for name in ("masked_fill", "where", "full_like", "clamp_max", "pad", "threshold"):
        expected = FILLS[name](leaf.build().to(BF16), extreme(LOWEST, BF16))
        with hmp.casts(LISTS["fills in bf16"]):
            got = FILLS[name](leaf.build(), LOWEST)
        assert_identical(got, expected, name)


def test_r12_integers_keep_torchs_error() -> None:
    with hmp.casts("habana"), pytest.raises(RuntimeError, match="without overflow"):
        torch.zeros(4, dtype=torch.int8).masked_fill(MASK, 1000)


# Arithmetic with a scalar beyond the low-precision dtype computes in float32 and saturates.
ARITHMETIC = {
    "x * s": (operator.mul, "mul"),
    "x * numpy's s": (lambda x, s: x * np.float64(s), "mul"),
    "s * x": (lambda x, s: s * x, "mul"),
    "torch.mul": (lambda x, s: torch.mul(x, s), "mul"),
    "torch.mul(other=)": (lambda x, s: torch.mul(x, other=s), "mul"),
    "multiply": (lambda x, s: torch.multiply(x, s), "mul"),
    "x + s": (operator.add, "add"),
    "s - x": (lambda x, s: s - x, "rsub"),
    "x.sub": (lambda x, s: x.sub(s), "sub"),
    "x / s": (operator.truediv, "truediv"),
}


def in_float32(call, x: torch.Tensor, scalar: float, low: torch.dtype) -> torch.Tensor:
    return saturated(call(x.to(F32), scalar), low)


@pytest.mark.parametrize("start", [F32, BF16, F16], ids=str)
def test_r12_arithmetic_with_a_scalar_beyond_bf16_saturates(start: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 0.25, math.inf, -math.inf], dtype=start)
    for (name, (call, op)), scalar in itertools.product(ARITHMETIC.items(), (LOWEST, -LOWEST, 3.4e38)):
        want = in_float32(call, x, scalar, BF16)
        with hmp.casts(policy(bf16=[op])):
            assert_identical(call(x, scalar), want, name)
        if op == "mul" and start is not F32:  # listed or not
            want = in_float32(call, x, scalar, start)
            for lists in (policy(), policy(promote=["mul"])):
                with hmp.casts(lists):
                    assert_identical(call(x, scalar), want, name)


def test_r12_sums_with_a_scalar_beyond_float16_saturate_listed_or_not() -> None:
    limit = MAX[F16]
    with hmp.casts(hmp.Policy.load("habana").replace(dtype=F16)):
        scores = torch.eye(2) @ torch.eye(2)
        assert (scores - 1e9).tolist() == (scores + -1e9).tolist() == (-1e9 + scores).tolist() == [[-limit] * 2] * 2
        assert (1e9 - scores).tolist() == [[limit] * 2] * 2
        alias = scores
        scores[0] += -1e9
        scores -= 1e9
        assert scores is alias and scores.tolist() == [[-limit] * 2] * 2
        assert (scores + float("-inf")).isinf().all()
        x = torch.zeros(70_001, dtype=F16)
        x[70_000] = 1e9  # an index is no value
        with pytest.raises(RuntimeError, match="automatic differentiation"):  # torch's refusal of out= with gradients
            torch.add(torch.ones(3, dtype=F16, requires_grad=True), 1e9, out=torch.empty(3, dtype=F16))
    assert x[70_000] == limit and x.count_nonzero() == 1


def test_r12_a_product_that_goes_to_out_saturates() -> None:
    """R6: the op runs under its rule, this one too; a float32 first input needs no help and is never narrowed (R5)."""
    for dtype, elsewhere in itertools.product((F32, BF16), (True, False)):
        x = torch.tensor([0.0, 1.0, -0.5], dtype=dtype)
        want = in_float32(operator.mul, x, LOWEST, BF16 if elsewhere else dtype).to(dtype)
        out = torch.empty(3, dtype=dtype) if elsewhere else x
        with hmp.casts("habana"):
            torch.mul(x, LOWEST, out=out)
        assert_identical(out, want, "out")


def test_r12_the_gradient_of_a_saturated_product_is_finite_in_the_leafs_dtype() -> None:
    x = torch.tensor([0.0, 0.5], requires_grad=True)
    with hmp.casts("habana"):
        (x * LOWEST).sum().backward()
    assert x.grad.dtype is F32 and bool(torch.isfinite(x.grad).all())


KEEP = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])  # the second row is masked altogether


def test_r12_infinities_stay_so_and_an_operand_that_needs_a_gradient_gets_the_plain_cast() -> None:
    mask, x = torch.tensor([0.0, -math.inf, LOWEST]), torch.tensor([1.0, LOWEST], requires_grad=True)
    with hmp.casts(policy(bf16=["add"])):
        assert (torch.zeros(3) + mask).tolist() == [0.0, -math.inf, -MAX[BF16]]
        got = outcome(lambda a: a + torch.ones(2), [x])
    assert_same(got, outcome(lambda a: a.to(BF16) + torch.ones(2, dtype=BF16), [x]))


ATTENTION_POLICIES = {
    "unlisted": LISTS["nothing"],
    "bf16": hmp.Policy("low", bf16={"scaled_dot_product_attention"}),
    "promote": hmp.Policy("promote", promote={"scaled_dot_product_attention"}),
    "fp32": hmp.Policy("wide", fp32={"scaled_dot_product_attention"}),
}


@pytest.mark.parametrize("lists", ATTENTION_POLICIES)
def test_r12_the_mask_of_scaled_dot_product_attention_becomes_the_querys_dtype(lists: str) -> None:
    """Saturating: a finite value stays finite, an infinity an infinity; a learned bias has a gradient in its own dtype."""
    q, k, v = (torch.randn(1, 2, 3, 4).to(BF16) for _ in range(3))
    attention = as_computed(F.scaled_dot_product_attention)
    dtype = F32 if lists == "fp32" else BF16
    for fill, has, learned in itertools.product((-math.inf, LOWEST, -1e4), (F32, BF16, F16), (False, True)):
        mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), fill)
        mask = (mask.clamp(min=torch.finfo(has).min) if math.isfinite(fill) else mask).to(has)
        fitting = torch.where(mask.isinf(), mask, mask.float().clamp(-MAX[dtype], MAX[dtype])).to(dtype)
        # torch chooses a kernel by whether the mask needs a gradient
        want = attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=fitting.requires_grad_(learned)).detach()
        with hmp.casts(ATTENTION_POLICIES[lists]):
            leaf = mask.clone().requires_grad_(learned)
            got = F.scaled_dot_product_attention(q, k, v, attn_mask=leaf)
            assert_identical(F.scaled_dot_product_attention(q, k, v, leaf).detach(), want, "by position")
            assert_identical(F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=leaf).detach(), want, "by keyword")
        assert_identical(got.detach(), want, f"{fill}, {has}")
        if learned:
            got.float().square().sum().backward()
            assert leaf.grad is not None and leaf.grad.dtype is has and leaf.grad.isfinite().all()


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


# --- scores that are masked whole


def test_r12_a_mask_times_a_mask_is_finite() -> None:
    keep = torch.tensor([[False, True], [False, False]])
    for dtype in (BF16, F16):
        with hmp.casts(policy(bf16=["mul"], dtype=dtype)):
            for product in (torch.full((2, 2), LOWEST) * keep, keep * torch.full((2, 2), LOWEST)):
                assert product.tolist() == [[0.0, torch.finfo(dtype).min], [0.0, 0.0]]


def test_r12_nested_tensors_are_no_masks() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    with hmp.casts("habana"):
        assert (nested * nested).dtype is torch.bfloat16
        assert (nested * 2.0).dtype is torch.bfloat16


# --- masks of every kind: a row that is masked wholly stays finite in softmax

SUM_LISTS = {
    "listed, softmax fp32": lambda low: hmp.Policy(bf16=("add", "sub", "where", "masked_fill", "baddbmm"), fp32=("softmax",), dtype=low),
    "listed, softmax low": lambda low: hmp.Policy(bf16=("add", "sub", "softmax"), dtype=low),
    "promote": lambda low: hmp.Policy(promote=("add", "sub", "where"), dtype=low),
    "fp32": lambda low: hmp.Policy(fp32=("add", "sub", "softmax"), dtype=low),
    "unlisted": lambda low: hmp.Policy(bf16=("linear",), dtype=low),
    "torch-cuda": lambda low: hmp.Policy.load("torch-cuda").replace(dtype=low),
    "apex-o1": lambda low: hmp.Policy.load("apex-o1").replace(dtype=low),
}
SUMS = {
    "s + m": operator.add,
    "m + s": lambda s, m: m + s,
    "torch.add": lambda s, m: torch.add(s, m),
    "add(other=)": lambda s, m: torch.add(input=s, other=m),
    "s - -m": lambda s, m: s - (-m),
    "torch.sub": lambda s, m: torch.sub(s, -m),
    "rsub": lambda s, m: torch.rsub(-m, s) if isinstance(m, torch.Tensor) else s + m,
    "s += m": lambda s, m: operator.iadd(s * 1, m),
    "add_": lambda s, m: (s * 1).add_(m),
    "s -= -m": lambda s, m: operator.isub(s * 1, -m),
    "add(out=)": lambda s, m: torch.add(s.detach(), m, out=torch.empty_like(s)) if isinstance(m, torch.Tensor) else s + m,
    "add(alpha=2)": lambda s, m: torch.add(s, m, alpha=2),
}
IN_PLACE_SUMS = ("s += m", "add_", "s -= -m")
LEAST = [LOWEST, torch.finfo(F16).min, -1e9, -1e4, -100000.0]
KINDS = ["float32", "the scores'", "int64", "0-dim", "0-dim int", "number", "numpy"]


def mask_of(kind: str, masked: torch.Tensor, least: float, dtype: torch.dtype):
    """A mask of that kind, and the same in float64; masks without dimensions mask every row."""
    least = least if "int" not in kind else max(least, -(10.0**9))
    if kind in ("number", "numpy"):
        return (np.float64(least) if kind == "numpy" else least), torch.tensor(least, dtype=torch.float64)
    if kind == "the scores'":
        least = max(least, torch.finfo(dtype).min)
    has = torch.int64 if "int" in kind else dtype if kind == "the scores'" else F32
    made = torch.tensor(int(least) if has is torch.int64 else least, dtype=has)
    made = made if kind.startswith("0-dim") else torch.zeros(masked.shape, dtype=has).masked_fill(masked, made)
    return made, made.double()


@settings(max_examples=5 * settings.default.max_examples)
@given(
    lists=st.sampled_from(sorted(SUM_LISTS)),
    spelling=st.sampled_from(sorted(SUMS)),
    kind=st.sampled_from(KINDS),
    least=st.sampled_from(LEAST),
    has=st.sampled_from([F32, F16, BF16]),
    scale=st.sampled_from([1.0, 30.0, 3000.0]),
    already=st.booleans(),
    shape=st.sampled_from([(2, 1, 1, 5), (2, 1, 4, 5), (4, 5), (1, 1, 4, 1), "expanded"]),
    grad=st.booleans(),
    seed=st.integers(0, 99),
)
def test_r12_a_row_that_is_masked_wholly_is_finite_however_the_mask_is_added(
    lists, spelling, kind, least, has, scale, already, shape, grad, seed
) -> None:
    """The oracle adds in float64 and saturates to the dtype of hmp's sum.

    Sums that are not on the BF16 list are torch's under a policy of bfloat16, in whose range usual masks are.
    """
    low = F16 if has is F32 else has
    into = spelling == "add(out=)"
    has, lists = (low, "promote" if lists == "fp32" else lists) if into else (has, lists)
    torch.manual_seed(seed)
    scores = (torch.randn(2, 3, 4, 5) * scale).to(low).to(has)
    masked = torch.rand((2, 1, 1, 5) if shape == "expanded" else shape) < 0.5
    masked[0] = True
    if already:
        scores[0] = torch.finfo(low).min
    mask, exact = mask_of(kind, masked, least, has)
    if shape == "expanded" and exact.dim():
        mask, exact = mask.expand(2, 3, 4, 5), exact.expand(2, 3, 4, 5)
    leaf = scores.clone().requires_grad_(grad and not into)
    with hmp.casts(SUM_LISTS[lists](low)):
        total = SUMS[spelling](leaf, mask)
        weights = F.softmax(total, -1)
        if leaf.requires_grad:
            weights.float().square().sum().backward()
    if total.dtype is F32:
        want = SUMS[spelling](scores.double(), exact).float()  # as in plain torch
    else:
        want = saturated(SUMS[spelling](scores.double(), exact), total.dtype)
    is_torchs = lists in ("unlisted", "torch-cuda", "promote", "apex-o1") and low is BF16 and spelling not in IN_PLACE_SUMS
    # -m is a dense tensor of the scores' dtype and shape
    is_like_a_residual = shape == "expanded" and kind == "the scores'" and spelling in ("s - -m", "torch.sub", "rsub", "s -= -m")
    if torch.isfinite(want).all() and not is_torchs and not (is_like_a_residual and not leaf.requires_grad):
        assert torch.isfinite(total).all() and torch.isfinite(weights).all()
        eps = torch.finfo(low).eps  # of the scalars, too, which torch rounds in place
        torch.testing.assert_close(total.double(), want.double(), rtol=eps, atol=0.1 + eps * 1e4)
        torch.testing.assert_close(weights.double().sum(-1), torch.ones(2, 3, 4, dtype=torch.float64), rtol=2e-2, atol=0)
        assert leaf.grad is None or (leaf.grad.dtype is has and torch.isfinite(leaf.grad).all())


def test_r12_a_mask_in_place_has_to_fit_as_in_torch() -> None:
    scores = torch.zeros(3, dtype=F16)
    for lists in ("listed, softmax fp32", "unlisted"):
        with hmp.casts(SUM_LISTS[lists](F16)), pytest.raises(RuntimeError, match="shape"):
            scores += torch.full((2, 3), LOWEST)
    assert scores.shape == (3,) and not scores.any()


CHOICES = {
    "where": lambda s, masked, m: torch.where(masked, m, s),
    "where reversed": lambda s, masked, m: s.where(~masked, m),
    "masked_fill": lambda s, masked, m: s.masked_fill(masked, m),
    "masked_fill_": lambda s, masked, m: s.clone().masked_fill_(masked, m),
}


@pytest.mark.parametrize("lists", SUM_LISTS)
def test_r12_a_row_that_is_masked_wholly_by_a_choice_is_finite(lists: str) -> None:
    masked, scores = KEEP == 0, torch.randn(2, 3, dtype=F16)
    values = {"float": LOWEST, "0-dim": torch.tensor(LOWEST), "int": torch.tensor(-(10**9)), "dims": torch.full((2, 3), -(10**9))}
    for (name, choose), (kind, value) in itertools.product(CHOICES.items(), values.items()):
        if kind == "dims" and "masked_fill" in name:
            continue
        with hmp.casts(SUM_LISTS[lists](F16)):
            found = choose(scores, masked, value)
        want = torch.where(masked, -MAX[F16], scores.float()) if found.dtype is F16 else choose(scores.float(), masked, value)
        assert_identical(found.float(), want.float(), f"{name}, {kind}")


def test_r12_baddbmm_of_a_mask_is_finite() -> None:
    """And what the product alone makes infinite stays so."""
    q, mask = torch.full((1, 3, 4), 12.0), torch.zeros(1, 3, 3)
    mask[0, 0] = LOWEST
    for least in (mask, mask.clamp(min=-MAX[F16])):
        with hmp.casts(SUM_LISTS["listed, softmax fp32"](F16)):
            found = torch.baddbmm(least, q, -q.transpose(1, 2))
            infinite = torch.baddbmm(torch.zeros(1, 3, 3), q * 1000, q.transpose(1, 2))
        assert found.tolist() == [[[-MAX[F16]] * 3, [-576.0] * 3, [-576.0] * 3]] and infinite.isinf().all()


def test_r12_real_infinities_of_scores_and_masks_stay() -> None:
    scores, mask = torch.tensor([[-40.0, -math.inf, 1.0, 2.0]], dtype=F16), torch.tensor([[LOWEST, LOWEST, -math.inf, 0.0]])
    for leaf in (scores, scores.clone().requires_grad_()):
        with hmp.casts(SUM_LISTS["listed, softmax fp32"](F16)):
            assert (leaf + mask).tolist() == (mask + leaf).tolist() == [[-MAX[F16], -math.inf, -math.inf, 2.0]]
    mask = torch.tensor([math.inf, LOWEST, -LOWEST])
    with hmp.casts(policy(bf16=["where"], dtype=F16)):
        assert torch.where(mask != 0, mask, mask).tolist() == [math.inf, -MAX[F16], MAX[F16]]


def test_r12_a_broadcast_mask_in_the_scores_dtype_is_finite() -> None:
    scores, mask = torch.full((2, 4), -40000.0, dtype=F16), torch.full((4,), -60000.0, dtype=F16)
    for lists in ("listed, softmax fp32", "unlisted"):
        with hmp.casts(SUM_LISTS[lists](F16)):
            assert (scores + mask).unique().tolist() == (mask + scores).unique().tolist() == [-MAX[F16]]


def test_r12_sums_of_masks_in_compiled_code_are_those_of_eager_code(fresh_compiler) -> None:
    def weights(s, m):
        return F.softmax(s + m, -1), F.softmax(s - -m, -1), F.softmax(torch.where(m < 0, m, s), -1)

    scores, masks = torch.randn(2, 3, 4).to(F16) * 30, [torch.full((2, 1, 4), LOWEST), torch.full((4,), -(10**9))]
    compiled = torch.compile(weights, backend="eager")
    for lists, mask, grad in itertools.product(("listed, softmax fp32", "unlisted", "promote"), masks, (False, True)):
        with hmp.casts(SUM_LISTS[lists](F16)):
            found, eager = (run(scores.clone().requires_grad_(grad), mask) for run in (compiled, weights))
        for got, want in zip(found, eager, strict=True):
            assert_identical(got.detach(), want.detach(), lists)
            assert torch.isfinite(got).all()


@pytest.mark.parametrize("name", ["add", "sub"])
def test_r12_a_listed_sum_in_compiled_code_rounds_its_inputs_as_in_eager_code(name, fresh_compiler) -> None:
    """Neither input needs a gradient, so that each may be a mask, and compiled code sees no values."""
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    with hmp.casts(hmp.Policy(bf16={name})):
        found = torch.compile(lambda *inputs: getattr(torch, name)(*inputs), backend="eager")(a, b)
    assert torch.equal(found, getattr(torch, name)(a.bfloat16(), b.bfloat16()))


def test_r12_a_trace_that_another_mode_makes_holds_for_masks_that_it_has_not_seen() -> None:
    """A graph that was made with a mask of zeros gets one that takes scores beyond the dtype: the row stays finite."""
    with hmp.casts(SUM_LISTS["listed, softmax fp32"](F16)):
        graph = make_fx(lambda s, m: F.softmax(s + m, -1))(torch.zeros(2, 4), torch.zeros(4))
    scores, mask = torch.tensor([[-9.0, 2.0, 0.0, 1.0]] * 2), torch.full((4,), LOWEST)
    assert_identical(graph(scores, mask), torch.full((2, 4), 0.25), "softmax")
