"""R2: all castable inputs of an op on the FP32 list become float32; integers stay; a look-up casts its result."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from op_table import FP32_LIST, Op, sites
from oracle import BF16, CASTABLE, F16, F32, F64, assert_same, by_explicit_casts, outcome, target
from strategies import INTEGER, RULES, Leaf, any_dtypes, build, castable_dtypes, leaves, pairs, spelled


def full(*names: str) -> hmp.Policy:
    return hmp.Policy(name="r2", bf16=frozenset(), fp32=frozenset(names), promote=frozenset())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("op", "call"), sites(FP32_LIST))
def test_r2_every_site_of_a_listed_op_runs_in_float32(op: Op, call, dtype: torch.dtype) -> None:
    args = [dataclasses.replace(a, dtype=dtype, seed=i) if isinstance(a, Leaf) else a for i, a in enumerate(op.args)]
    expected = op.expected(call, build(args), "fp32")
    with hmp.casts("habana"):
        got = outcome(call, build(args))
    assert F32 in {r.dtype for r in got.results}
    assert_same(got, expected)


@pytest.mark.parametrize("op", FP32_LIST, ids=lambda op: f"{op.name}-{next(iter(op.sites))}")
@given(data=st.data())
@RULES
def test_r2_equals_casts_written_by_hand(op: Op, data: st.DataObject) -> None:
    call = op.sites[data.draw(st.sampled_from(sorted(op.sites)))]
    args = data.draw(op.draw())
    expected = op.expected(call, build(args), "fp32")
    with hmp.casts("habana"):
        got = outcome(call, build(args))
    assert_same(got, expected)


@given(pairs(values="positive"), st.sampled_from(["div", "/", "Tensor.divide", "true_divide"]))
@RULES
def test_r2_division_of_any_two_tensors_0dim_and_empty_included(leaves_, site) -> None:
    call = {
        "div": lambda a, b: torch.div(a, b),
        "/": lambda a, b: a / b,
        "Tensor.divide": lambda a, b: a.divide(b),
        "true_divide": lambda a, b: torch.true_divide(a, b),
    }[site]
    args = build(leaves_)
    expected = by_explicit_casts(call, args, {}, target("fp32", args))
    with hmp.casts("habana"):
        got = outcome(call, build(leaves_))
    assert_same(got, expected)


KEYWORDS = {
    "div": (lambda *a, **k: torch.div(*a, **k), ("input", "other"), [(2, 3), (3,)], 0),
    "smooth_l1_loss": (lambda *a, **k: F.smooth_l1_loss(*a, **k), ("input", "target"), [(4,), (4,)], 0),
    "cross_entropy": (lambda *a, **k: F.cross_entropy(*a, **k), ("input", "target"), [(4, 3), (4, 3)], 0),
    "Tensor.div": (lambda s, *a, **k: s.div(*a, **k), ("self", "other"), [(2, 3), (3,)], 1),
}


@pytest.mark.parametrize("name", KEYWORDS)
@given(data=st.data())
@RULES
def test_r2_holds_for_positional_and_keyword_arguments_in_any_order(name: str, data: st.DataObject) -> None:
    call, names, shapes, positional = KEYWORDS[name]
    drawn = [data.draw(leaves(shape, values="positive")) for shape in shapes]
    args, kwargs = data.draw(spelled(names, drawn, positional))
    expected = by_explicit_casts(call, build(args), build(kwargs), F32)
    with hmp.casts("habana"):
        got = outcome(call, build(args), build(kwargs))
    assert {r.dtype for r in got.results} == {F32}
    assert_same(got, expected)


@given(st.lists(leaves((2, 3), any_dtypes), min_size=1, max_size=3), st.sampled_from([list, tuple]))
@RULES
def test_r2_reaches_tensors_inside_lists_and_tuples(drawn, container) -> None:
    nest = container(drawn)
    args = build([nest])
    expected = by_explicit_casts(torch.cat, args, {}, target("fp32", args))
    with hmp.casts(full("cat")):
        got = outcome(lambda ts: torch.cat(ts), build([nest]))
    assert_same(got, expected)


@given(st.sampled_from(INTEGER), st.sampled_from(["div", "floor", "topk", "log", "softmax"]), st.integers(0, 99))
@RULES
def test_r2_integers_stay_integers(dtype, name, seed) -> None:
    """div of two ints is torch's own float32, rounding_mode keeps int64, topk keeps the dtype, softmax of ints still raises."""
    call = {
        "div": lambda a, b: a / b,
        "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
        "topk": lambda a, b: torch.topk(a, 2),
        "log": lambda a, b: torch.log(b),
        "softmax": lambda a, b: torch.softmax(a, 0),
    }[name]
    tree = [Leaf((4,), dtype, seed=seed), Leaf((4,), dtype, values="positive", seed=seed + 1)]
    expected = outcome(call, build(tree))
    with hmp.casts("habana"):
        got = outcome(call, build(tree))
    assert_same(got, expected)


@pytest.mark.parametrize("dtype", [BF16, F16, F64, F32])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, d: torch.softmax(x, 0, dtype=d),
        lambda x, d: torch.softmax(x, 0, d),
        lambda x, d: x.softmax(0, d),
        lambda x, d: F.softmax(x, 0, dtype=d),
        lambda x, d: F.log_softmax(x, 0, 3, d),
        lambda x, d: torch.log_softmax(x, dim=0, dtype=d),
        lambda x, d: torch.special.log_softmax(x, 0, dtype=d),
    ],
)
def test_r2_an_explicit_dtype_wins(call, dtype: torch.dtype) -> None:
    leaf = Leaf((5,), BF16, seed=3)
    expected = outcome(call, [leaf.build(), dtype])
    with hmp.casts("habana"):
        got = outcome(call, [leaf.build(), dtype])
    assert got.results[0].dtype is dtype
    assert_same(got, expected)


LOOKUPS = {
    "F": lambda table, rows, **k: F.embedding(rows, table, **k),
    "torch": lambda table, rows, **k: torch.embedding(table, rows),
    "module": lambda table, rows, **k: torch.func.functional_call(torch.nn.Embedding(5, 4), {"weight": table}, (rows,)),
}


@pytest.mark.parametrize("site", LOOKUPS)
@pytest.mark.parametrize("rule", ["bf16", "fp32"])
@given(dtype=castable_dtypes, seed=st.integers(0, 99))
@RULES
def test_r2_a_lookup_casts_the_result_and_not_the_table(site, rule, dtype, seed) -> None:
    to = BF16 if rule == "bf16" else F32
    rows = torch.tensor([[0, 2, 2], [4, 1, 0]])
    table = Leaf((5, 4), dtype, seed=seed)
    call = LOOKUPS[site]
    expected = outcome(lambda t, r: call(t, r).to(to), [table.build(), rows])
    lists = {"bf16": frozenset(), "fp32": frozenset(), "promote": frozenset()} | {rule: frozenset({"embedding"})}
    with hmp.casts(hmp.Policy(name="lookup", **lists)):
        got = outcome(call, [table.build(), rows])
    assert got.results[0].dtype is to
    assert_same(got, expected)


def test_r2_a_lookup_makes_no_copy_of_the_table() -> None:
    """What autograd saves for the backward of a look-up is the rows, so a cast table would show as a cast node."""
    table = torch.randn(5, 4, dtype=BF16, requires_grad=True)
    with hmp.casts("habana"):
        out = F.embedding(torch.tensor([1, 2]), table)
    assert out.dtype is F32
    assert "ToCopy" in out.grad_fn.name()  # the result was cast
    assert "Embedding" in out.grad_fn.next_functions[0][0].name()  # and the look-up took the table as it is


def test_r2_sparse_gradients_of_a_lookup_stay_sparse() -> None:
    table = torch.nn.Embedding(5, 4, sparse=True)
    with hmp.casts("habana"):
        table(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad.is_sparse and table.weight.grad.dtype is F32


@given(st.sampled_from(CASTABLE), st.sampled_from(["sum", "mean", "max"]), st.integers(0, 99))
@RULES
def test_r2_embedding_bag_sums_rows_in_float32(dtype, mode, seed) -> None:
    call = lambda t, rows: F.embedding_bag(rows, t, mode=mode)  # noqa: E731
    rows = torch.tensor([[0, 2, 2], [4, 1, 0]])
    table = Leaf((5, 4), dtype, seed=seed)
    expected = by_explicit_casts(call, [table.build(), rows], {}, F32)
    with hmp.casts("habana"):
        got = outcome(call, [table.build(), rows])
    assert got.results[0].dtype is F32
    assert_same(got, expected)


def test_r2_topk_returns_torchs_own_named_tuple() -> None:
    x = torch.randn(6).to(BF16)
    with hmp.casts("habana"):
        top = torch.topk(x, 2)
        values, indices = x.topk(2)
    assert type(top) is torch.return_types.topk
    assert top.values.dtype is F32 and top.indices.dtype is torch.int64
    assert torch.equal(values, top.values) and torch.equal(indices, top.indices)


def test_r2_float64_keeps_its_precision() -> None:
    tiny = torch.tensor([1e-300], dtype=F64)
    with hmp.casts("habana"):
        assert torch.log(tiny).dtype is F64 and bool(torch.isfinite(torch.log(tiny)))
        assert (tiny / torch.ones(1)).dtype is F64
