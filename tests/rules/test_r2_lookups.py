"""R2 where an op is no pointwise one: a look-up casts its result and not its table, a bag sums in float32, topk keeps its tuple."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from oracle import BF16, CASTABLE, F32, assert_same, by_explicit_casts, outcome
from strategies import Leaf, castable_dtypes
from trap_kit import policy

LOOKUPS = {
    "F": lambda table, rows, **k: F.embedding(rows, table, **k),
    "torch": lambda table, rows, **k: torch.embedding(table, rows),
    "module": lambda table, rows, **k: torch.func.functional_call(torch.nn.Embedding(5, 4), {"weight": table}, (rows,)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("site", LOOKUPS)
@pytest.mark.parametrize("rule", ["bf16", "fp32"])
@given(dtype=castable_dtypes, seed=st.integers(0, 99))
def test_r2_a_lookup_casts_the_result_and_not_the_table(site, rule, dtype, seed) -> None:
    to, rows, table = {"bf16": BF16, "fp32": F32}[rule], torch.tensor([[0, 2, 2], [4, 1, 0]]), Leaf((5, 4), dtype, seed=seed)
    call = LOOKUPS[site]
    expected = outcome(lambda t, r: call(t, r).to(to), [table.build(), rows])
    with hmp.casts(policy(**{rule: ["embedding"]})):
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


@given(st.sampled_from(CASTABLE), st.sampled_from(["sum", "mean", "max"]), st.integers(0, 99))
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
