"""R3: all castable inputs become the widest dtype among them; a 0-dim tensor widens no tensor that has dimensions."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from oracle import BF16, F16, F32, F64, assert_same, by_explicit_casts, outcome, target
from strategies import Leaf, any_dtypes, build, leaves, pairs, spelled


def wide(*names: str) -> hmp.Policy:
    return hmp.Policy(name="r3", bf16=frozenset(), fp32=frozenset(), promote=frozenset(names))


# torch promotes these exactly by itself (torch-surface.md, 2C): on the list they are torch, to the bit.
NATIVE = {
    "add": lambda a, b: torch.add(a, b),
    "+": lambda a, b: a + b,
    "sub": lambda a, b: torch.sub(a, b, alpha=2),
    "-": operator.sub,
    "mul": lambda a, b: a.mul(b),
    "div": lambda a, b: torch.div(a, b),
    "pow": lambda a, b: torch.pow(a, b),
    "maximum": lambda a, b: torch.maximum(a, b),
    "fmin": lambda a, b: torch.fmin(a, b),
    "atan2": lambda a, b: torch.atan2(a, b),
    "where": lambda a, b: torch.where(a > b, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "hypot": lambda a, b: torch.hypot(a, b),
    "remainder": lambda a, b: a % b,
    "eq": lambda a, b: torch.eq(a, b),
    "lt": lambda a, b: a < b,
    "logical_and": lambda a, b: torch.logical_and(a, b),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "l1_loss": lambda a, b: F.l1_loss(a, b, reduction="none"),
    "outer": lambda a, b: torch.outer(a.reshape(-1), b.reshape(-1)),
}
NATIVE_NAMES = (
    "add sub mul div pow maximum fmin atan2 where addcmul hypot remainder eq lt logical_and mse_loss l1_loss outer "
    "cat concat stack hstack vstack dstack column_stack block_diag"
).split()


# torch computes parts of their gradients in the narrower dtype, so on a promote list they are cast, a 0-dim input too; the gradient of a
# mixture's mse_loss raises in torch 2.7.
INEXACT = ("pow", "atan2", "addcmul", *(("mse_loss",) if torch.__version__ < (2, 13) else ()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in NATIVE if name not in INEXACT])
@given(pairs(values="positive"))
def test_r3_what_torch_promotes_by_itself_stays_torchs_to_the_bit(name: str, tree) -> None:
    call = NATIVE[name]
    expected = outcome(call, build(tree))
    with hmp.casts(wide(*NATIVE_NAMES)):
        got = outcome(call, build(tree))
    assert_same(got, expected)


@pytest.mark.parametrize("name", ["torch.cat", "torch.add", "torch.stack", "torch.Tensor.add", "torch.Tensor.__add__"])
def test_r3_a_name_that_torch_promotes_by_itself_gets_no_wrapper(name: str) -> None:
    *path, last = name.split(".")[1:]
    owner = torch.Tensor if path else torch
    before = getattr(owner, last)
    with hmp.casts("habana"):
        assert getattr(owner, last) is before
    with hmp.casts(hmp.Policy(name="listed", bf16=frozenset({"cat", "add", "stack"}))):
        assert getattr(owner, last) is not before


# join: (call, shapes). A 0-dim tensor counts here, as in torch.
JOINS = {
    "cat": (lambda ts: torch.cat(ts), [(2,), (3,), (0,)]),
    "cat_kw": (lambda ts: torch.cat(tensors=ts, dim=-1), [(2, 1), (2, 3), (2, 2)]),
    "concat": (lambda ts: torch.concat(ts), [(2,), (3,)]),
    "stack": (lambda ts: torch.stack(ts), [(), (), ()]),
    "hstack": (lambda ts: torch.hstack(ts), [(2,), (), (3,)]),
    "column_stack": (lambda ts: torch.column_stack(ts), [(2,), (2,)]),
    "vstack": (lambda ts: torch.vstack(ts), [(3,), (1, 3)]),
    "block_diag": (lambda ts: torch.block_diag(*ts), [(2, 2), (2,), (1, 3)]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", JOINS)
@given(data=st.data(), container=st.sampled_from([list, tuple]))
def test_r3_joins_widen_and_count_0dim_tensors(name: str, data: st.DataObject, container) -> None:
    call, shapes = JOINS[name]
    nest = container(data.draw(leaves(shape)) for shape in shapes)
    args = build([nest])
    dtype = target("join", args)
    expected = by_explicit_casts(call, args, {}, dtype)
    with hmp.casts("habana"):
        got = outcome(call, build([nest]))
    assert got.results[0].dtype is dtype
    assert_same(got, expected)


# torch refuses the mixture, or rounds in between (2A's matmul family, geometry apart, and 2C's "rounded first").
# (call, names of the arguments, shapes, kind of values)
WRAPPED = {
    "mm": (lambda *a, **k: torch.mm(*a, **k), ("input", "mat2"), [(2, 3), (3, 4)]),
    "bmm": (lambda *a, **k: torch.bmm(*a, **k), ("input", "mat2"), [(2, 2, 3), (2, 3, 2)]),
    "matmul": (lambda *a, **k: torch.matmul(*a, **k), ("input", "other"), [(2, 3), (3,)]),
    "addmm": (lambda *a, **k: torch.addmm(*a, **k), ("input", "mat1", "mat2"), [(4,), (2, 3), (3, 4)]),
    "addbmm": (lambda *a, **k: torch.addbmm(*a, **k), ("input", "batch1", "batch2"), [(2, 2), (3, 2, 4), (3, 4, 2)]),
    "baddbmm": (lambda *a, **k: torch.baddbmm(*a, **k), ("input", "batch1", "batch2"), [(3, 2, 2), (3, 2, 4), (3, 4, 2)]),
    "addmv": (lambda *a, **k: torch.addmv(*a, **k), ("input", "mat", "vec"), [(2,), (2, 3), (3,)]),
    "linear": (lambda *a, **k: F.linear(*a, **k), ("input", "weight", "bias"), [(2, 3), (4, 3), (4,)]),
    "conv2d": (lambda *a, **k: F.conv2d(*a, **k), ("input", "weight", "bias"), [(1, 2, 4, 4), (3, 2, 3, 3), (3,)]),
    "bilinear": (lambda *a, **k: F.bilinear(*a, **k), ("input1", "input2", "weight", "bias"), [(2, 3), (2, 4), (5, 3, 4), (5,)]),
    "inner": (lambda *a, **k: torch.inner(*a, **k), ("input", "other"), [(2, 3), (4, 3)]),
    "vdot": (lambda *a, **k: torch.vdot(*a, **k), ("input", "other"), [(3,), (3,)]),
    "cross": (lambda *a, **k: torch.cross(*a, dim=-1, **k), ("input", "other"), [(2, 3), (2, 3)]),
    "linalg.cross": (lambda *a, **k: torch.linalg.cross(*a, **k), ("input", "other"), [(2, 3), (2, 3)]),
    "chain_matmul": (lambda a, b, c: torch.chain_matmul(a, b, c), None, [(2, 3), (3, 4), (4, 2)]),
    "linalg.multi_dot": (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), None, [(2, 3), (3, 4), (4, 2)]),
    "linalg.vecdot": (lambda a, b: torch.linalg.vecdot(a, b), None, [(2, 3), (2, 3)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=1), None, [(2, 3), (3, 4)]),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), None, [(2, 3), (3, 4)]),
    "einsum_of_a_product": (lambda a, b: torch.einsum("ij,ij->ij", a, b), None, [(2, 3), (2, 3)]),
    "lerp": (lambda *a, **k: torch.lerp(*a, **k), ("input", "end", "weight"), [(2, 3), (2, 3), (3,)]),
    "prelu": (lambda *a, **k: F.prelu(*a, **k), ("input", "weight"), [(2, 3), (3,)]),
    "heaviside": (lambda *a, **k: torch.heaviside(*a, **k), ("input", "values"), [(3,), (3,)]),
    "isclose": (lambda *a, **k: torch.isclose(*a, **k), ("input", "other"), [(3,), (3,)]),
    "addr": (lambda *a, **k: torch.addr(*a, **k), ("input", "vec1", "vec2"), [(2, 3), (2,), (3,)]),
    "ldexp": (lambda *a, **k: torch.ldexp(*a, **k), ("input", "other"), [(3,), (3,)]),
    "cosine_similarity": (lambda *a, **k: F.cosine_similarity(*a, **k), ("x1", "x2"), [(2, 3), (2, 3)]),
    "truediv_of_a_reversed_pair": (lambda a, b: b.__rtruediv__(a), None, [(2, 3), (3,)]),
    "trapz": (lambda a, b: torch.trapz(a, b), None, [(4,), (4,)]),
    "atan2": (lambda a, b: torch.atan2(a, b), None, [(2, 3), (2, 3)]),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c), None, [(2, 3), (2, 3), (2, 3)]),
    "kl_div": (lambda a, b: F.kl_div(a, b, reduction="batchmean"), None, [(2, 3), (2, 3)]),
    "gaussian_nll_loss": (lambda a, b, c: F.gaussian_nll_loss(a, b, c), None, [(3,), (3,), (3,)]),
    "margin_ranking_loss": (lambda a, b, c: F.margin_ranking_loss(a, b, c, 0.3), None, [(3,), (3,), (3,)]),
    "poisson_nll_loss": (lambda a, b: F.poisson_nll_loss(a, b, full=True), None, [(3,), (3,)]),
    "triplet_margin_loss": (lambda a, b, c: F.triplet_margin_loss(a, b, c), None, [(2, 3), (2, 3), (2, 3)]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", WRAPPED)
@given(data=st.data())
def test_r3_equals_casts_to_the_widest_written_by_hand(name: str, data: st.DataObject) -> None:
    call, names, shapes = WRAPPED[name]
    drawn = [data.draw(leaves(shape, values="positive")) for shape in shapes]
    args, kwargs = data.draw(spelled(names, drawn)) if names else (tuple(drawn), {})
    built = build(args), build(kwargs)
    expected = by_explicit_casts(call, *built, target("promote", built))
    with hmp.casts(wide(name.split("_of_")[0])):
        got = outcome(call, build(args), build(kwargs))
    if expected.error is None and expected.results[0].is_floating_point():
        assert got.results and got.results[0].dtype is target("promote", built)
    assert_same(got, expected)


@given(pairs(any_dtypes, values="positive"), st.sampled_from(["cosine_similarity", "isclose", "heaviside", "ldexp"]))
def test_r3_integers_float64_and_complex_are_left_as_torch_has_them(tree, name: str) -> None:
    call = {
        "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, dim=-1),
        "isclose": lambda a, b: torch.isclose(a, b),
        "heaviside": lambda a, b: torch.heaviside(a, b),
        "ldexp": lambda a, b: torch.ldexp(a, b),
    }[name]
    args = build(tree)
    expected = by_explicit_casts(call, args, {}, target("promote", args))
    with hmp.casts(wide(name)):
        got = outcome(call, build(tree))
    assert_same(got, expected)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("scalar", [F32, F16, BF16])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("name", ["add", "radd", "maximum", "where", "lerp", "addcmul", "isclose", "ldexp", "heaviside"])
def test_r3_a_0dim_tensor_does_not_widen_a_tensor_that_has_dimensions(name: str, dtype: torch.dtype, scalar: torch.dtype) -> None:
    """A learned fp32 scalar must not turn bf16 activations into fp32 (trap U11); where torch refuses the mixture it is cast along."""
    call = {
        "add": lambda x, s: x + s,
        "radd": lambda x, s: torch.add(s, x),
        "maximum": lambda x, s: torch.maximum(x, s),
        "where": lambda x, s: torch.where(x > 0, x, s),
        "lerp": lambda x, s: torch.lerp(x, x * x, s),
        "addcmul": lambda x, s: torch.addcmul(x, x, s),
        "isclose": lambda x, s: torch.isclose(x, s, rtol=0.3),
        "ldexp": lambda x, s: torch.ldexp(x, s),
        "heaviside": lambda x, s: torch.heaviside(x, s),
    }[name]
    grad = name != "heaviside"  # which has no derivative
    tree = [Leaf((4,), dtype, grad=grad, seed=5), Leaf((), scalar, grad=grad, seed=6)]
    with hmp.casts(wide(name.removeprefix("r"))):
        got = outcome(call, build(tree))
    assert got.error is None
    assert got.results[0].dtype is (torch.bool if name == "isclose" else dtype)
    if name not in ("isclose", "ldexp"):  # compared, and multiplied by 2 ** s, without rounding s first in torch
        assert_same(got, by_explicit_casts(call, build(tree), {}, dtype) if name in ("lerp", "heaviside") else outcome(call, build(tree)))


def test_r3_float64_is_left_to_torch() -> None:
    double, low = torch.randn(2, 2, dtype=F64), torch.randn(2, 2).to(BF16)
    with hmp.casts(wide("mm", "add")):
        assert (double + low).dtype is F64
        with pytest.raises(RuntimeError):
            torch.mm(double, low)
