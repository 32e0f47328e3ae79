"""R1: all castable inputs of an op on the BF16 list become the low dtype, wherever they stand; `dtype=` wins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from op_table import BF16_LIST, Op, sites
from oracle import BF16, CASTABLE, F16, F32, F64, assert_same, by_explicit_casts, left_to_torch, outcome, target
from strategies import INTEGER, RULES, Leaf, Tagged, any_dtypes, build, castable_dtypes, leaves, pairs, spelled


def low(*names: str, dtype: torch.dtype = BF16) -> hmp.Policy:
    return hmp.Policy(name="r1", dtype=dtype, bf16=frozenset(names), fp32=frozenset(), promote=frozenset())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("op", "call"), sites(BF16_LIST))
def test_r1_every_site_of_a_listed_op_runs_in_bf16(op: Op, call) -> None:
    args = [dataclasses.replace(a, seed=i) if isinstance(a, Leaf) else a for i, a in enumerate(op.args)]
    expected = op.expected(call, build(args), "bf16")
    with hmp.casts("habana"):
        got = outcome(call, build(args))
    assert {r.dtype for r in got.results} == {BF16}
    assert_same(got, expected)


@pytest.mark.parametrize("op", BF16_LIST, ids=lambda op: op.name)
@given(data=st.data())
@RULES
def test_r1_equals_casts_written_by_hand(op: Op, data: st.DataObject) -> None:
    call = op.sites[data.draw(st.sampled_from(sorted(op.sites)))]
    args = data.draw(op.draw())
    expected = op.expected(call, build(args), "bf16")
    with hmp.casts("habana"):
        got = outcome(call, build(args))
    assert_same(got, expected)


@given(pairs(), st.sampled_from(["torch.mul", "*", "Tensor.mul", "__rmul__"]))
@RULES
def test_r1_mul_of_any_two_tensors_0dim_and_empty_included(leaves_, site) -> None:
    call = next(op for op in BF16_LIST if op.name == "mul").sites[site]
    args = build(leaves_)
    expected = by_explicit_casts(call, args, {}, target("bf16", args))
    with hmp.casts("habana"):
        got = outcome(call, build(leaves_))
    assert_same(got, expected)


KEYWORDS = {
    "mul": (lambda *a, **k: torch.mul(*a, **k), ("input", "other"), [(2, 3), (3,)], 0),
    "addmm": (lambda *a, **k: torch.addmm(*a, **k), ("input", "mat1", "mat2"), [(2, 4), (2, 3), (3, 4)], 0),
    "Tensor.addmm": (lambda s, *a, **k: s.addmm(*a, **k), ("self", "mat1", "mat2"), [(2, 4), (2, 3), (3, 4)], 1),
    "linear": (lambda *a, **k: F.linear(*a, **k), ("input", "weight", "bias"), [(2, 3), (4, 3), (4,)], 0),
    "conv2d": (lambda *a, **k: F.conv2d(*a, **k), ("input", "weight", "bias"), [(1, 2, 4, 4), (3, 2, 3, 3), (3,)], 0),
    "matmul": (lambda *a, **k: torch.matmul(*a, **k), ("input", "other"), [(2, 3), (3, 2)], 0),
    "mv": (lambda *a, **k: torch.mv(*a, **k), ("input", "vec"), [(2, 3), (3,)], 0),
    "bmm": (lambda *a, **k: torch.bmm(*a, **k), ("input", "mat2"), [(2, 2, 3), (2, 3, 2)], 0),
}


@pytest.mark.parametrize("name", KEYWORDS)
@given(data=st.data())
@RULES
def test_r1_holds_for_positional_and_keyword_arguments_in_any_order(name: str, data: st.DataObject) -> None:
    call, names, shapes, positional = KEYWORDS[name]
    drawn = [data.draw(leaves(shape)) for shape in shapes]
    args, kwargs = data.draw(spelled(names, drawn, positional))
    built = build(args), build(kwargs)
    expected = by_explicit_casts(call, *built, BF16)
    with hmp.casts("habana"):
        got = outcome(call, build(args), build(kwargs))
    assert {r.dtype for r in got.results} == {BF16}
    assert_same(got, expected)


NESTED = {
    "cat": (lambda ts: torch.cat(ts), [(2, 3), (1, 3), (2, 3)]),
    "stack": (lambda ts: torch.stack(tensors=ts, dim=1), [(2, 3), (2, 3)]),
    "block_diag": (lambda ts: torch.block_diag(*ts), [(2, 3), (1, 3)]),
    "einsum": (lambda ts: torch.einsum("ij,jk->ik", ts), [(2, 3), (3, 4)]),
    "linalg.multi_dot": (lambda ts: torch.linalg.multi_dot(ts), [(2, 3), (3, 4), (4, 2)]),
    "meshgrid": (lambda ts: torch.meshgrid(*ts, indexing="ij"), [(2,), (3,)]),
}


@pytest.mark.parametrize("name", NESTED)
@given(data=st.data())
@RULES
def test_r1_reaches_tensors_inside_lists_and_tuples(name: str, data: st.DataObject) -> None:
    call, shapes = NESTED[name]
    container = list if name == "linalg.multi_dot" else data.draw(st.sampled_from([list, tuple]))
    nest = container(data.draw(leaves(shape, any_dtypes)) for shape in shapes)
    args = build([nest])
    expected = by_explicit_casts(call, args, {}, target("bf16", args))
    with hmp.casts(low(name)):
        got = outcome(call, build([nest]))
    assert_same(got, expected)


@pytest.mark.parametrize("dtype", [F32, F64, F16])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, d: torch.softmax(x, 0, dtype=d),
        lambda x, d: torch.softmax(x, 0, d),
        lambda x, d: x.softmax(0, dtype=d),
        lambda x, d: x.softmax(0, d),
        lambda x, d: F.softmax(x, 0, dtype=d),
        lambda x, d: F.softmax(x, 0, 3, d),
        lambda x, d: torch.special.softmax(x, 0, dtype=d),
        lambda x, d: torch.sum(x, dtype=d),
        lambda x, d: x.cumsum(0, dtype=d),
    ],
)
def test_r1_an_explicit_dtype_wins(call, dtype: torch.dtype) -> None:
    leaf = Leaf((5,), F32, seed=3)
    expected = outcome(call, [leaf.build(), dtype])
    with hmp.casts(low("softmax", "sum", "cumsum")):
        got = outcome(call, [leaf.build(), dtype])
        default = outcome(lambda x: torch.softmax(x, 0), [leaf.build()])
    assert default.results[0].dtype is BF16
    assert got.results[0].dtype is dtype
    assert_same(got, expected)


@given(pairs(st.sampled_from(INTEGER)))
@RULES
def test_r1_integers_and_bools_are_never_cast(leaves_) -> None:
    expected = outcome(torch.mul, build(leaves_))
    with hmp.casts("habana"):
        got = outcome(lambda a, b: torch.mul(a, b), build(leaves_))
    assert not got.results[0].is_floating_point()
    assert_same(got, expected)


@pytest.mark.parametrize("foreign", [F64, torch.complex64])
@pytest.mark.parametrize("other", [*CASTABLE, torch.int64])
@pytest.mark.parametrize("swap", [False, True])
def test_r1_an_op_with_a_float64_or_complex_input_is_left_to_torch(foreign: torch.dtype, other: torch.dtype, swap: bool) -> None:
    tree = [Leaf((3,), foreign, seed=1), Leaf((3,), other, seed=2)][:: -1 if swap else 1]
    assert left_to_torch(build(tree))
    for call in (torch.Tensor.__mul__, torch.Tensor.dot):
        name = call.__name__
        expected = outcome(call, build(tree))
        with hmp.casts("habana"):
            got = outcome(lambda a, b, name=name: getattr(a, name)(b), build(tree))
        assert_same(got, expected)


def test_r1_float8_and_quantized_tensors_are_never_cast() -> None:
    eight = torch.randn(2, 3).to(torch.float8_e4m3fn)
    quantized = torch.quantize_per_tensor(torch.tensor([-1.0, 2.0]), 0.1, 10, torch.quint8)
    with hmp.casts("habana"):
        assert torch.t(eight).dtype is torch.float8_e4m3fn
        assert torch.relu(quantized).dtype is torch.quint8


def test_r1_sparse_tensors_are_cast() -> None:
    dense = torch.tensor([[0.0, 1.1], [2.3, 0.0]])
    other = torch.randn(2, 3)
    want = torch.mm(dense.to_sparse().to(BF16), other.to(BF16))
    with hmp.casts("habana"):
        got = torch.mm(dense.to_sparse(), other)
        turned = torch.relu(dense.to_sparse())
    assert turned.is_sparse and turned.dtype is BF16
    assert got.dtype is BF16 and torch.equal(got, want)


def test_r1_a_subclass_stays_a_subclass() -> None:
    tagged = torch.randn(3).as_subclass(Tagged)
    with hmp.casts("habana"):
        got = torch.relu(tagged)
        by_dunder = tagged * torch.randn(3)
    assert type(got) is Tagged and got.dtype is BF16
    assert type(by_dunder) is Tagged and by_dunder.dtype is BF16


@given(pairs(castable_dtypes))
@RULES
def test_r1_the_low_dtype_is_float16_where_the_policy_says_so(leaves_) -> None:
    args = build(leaves_)
    expected = by_explicit_casts(torch.mul, args, {}, F16)
    with hmp.casts(low("mul", dtype=F16)):
        got = outcome(lambda a, b: a * b, build(leaves_))
    assert got.results[0].dtype is F16
    assert_same(got, expected)


def test_r1_inputs_themselves_stay_what_they_are() -> None:
    """A cast is of the argument, not of the caller's tensor."""
    weight = torch.nn.Parameter(torch.randn(3, 4))
    x = torch.randn(2, 4)
    storage = weight.data_ptr()
    with hmp.casts("habana"):
        F.linear(x, weight).sum().backward()
    assert weight.dtype is F32 and weight.data_ptr() == storage and weight.grad.dtype is F32 and x.dtype is F32


def test_r1_holds_process_wide_after_convert() -> None:
    x = torch.randn(2, 3)
    hmp.convert()
    assert (x @ x.t()).dtype is BF16
    hmp.revert()
    assert (x @ x.t()).dtype is F32


def test_r1_a_foreign_type_still_gets_its_turn_in_an_operator() -> None:
    """`tensor * thing` falls to `thing.__rmul__`: the dunder answers NotImplemented, and so must its wrapper (trap N2)."""

    class Thing:
        def __rmul__(self, other):
            return "rmul"

        def __rmatmul__(self, other):
            return "rmatmul"

    with hmp.casts("habana"):
        assert (torch.ones(3) * np.float32(1.5)).tolist() == [1.5] * 3
        assert np.multiply(np.ones(3), 2.0).tolist() == [2.0] * 3
        assert torch.equal(torch.ones(3) + np.ones(3, dtype=np.float32), torch.full((3,), 2.0))
        assert torch.ones(2) * Thing() == "rmul"
        assert torch.ones(2) @ Thing() == "rmatmul"
        assert type(torch.ones(2) * 2.0) is torch.Tensor
