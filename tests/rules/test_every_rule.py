"""R1 to R4 and R7: a call gives what plain torch gives with its rule's casts written out by hand, however its arguments are spelled."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from oracle import F32, Outcome, assert_same, by_explicit_casts, outcome, target
from strategies import Leaf, any_dtypes, build, leaves, pairs, spelled

_ROW = torch.tensor([[2, 0, 1]])
_MASK = torch.tensor([[True, False, True], [False, False, True], [True, True, False]])


class Call(NamedTuple):
    """A call, the shapes of its tensors, and the names by which they can be given (the first alone by position, where it is `self`)."""

    call: Callable[..., Any]
    shapes: list[tuple[int, ...]]
    names: tuple[str, ...] = ()


# By the name that a list has for it; what follows "_of_" tells two calls of one op apart.
CALLS = {
    "addbmm": Call(lambda *a, **k: torch.addbmm(*a, **k), [(2, 2), (3, 2, 4), (3, 4, 2)], ("input", "batch1", "batch2")),
    "addcmul": Call(lambda a, b, c: torch.addcmul(a, b, c), [(2, 3), (2, 3), (2, 3)]),
    "addmm": Call(lambda *a, **k: torch.addmm(*a, **k), [(4,), (2, 3), (3, 4)], ("input", "mat1", "mat2")),
    "addmm_of_a_tensor": Call(lambda s, *a, **k: s.addmm(*a, **k), [(2, 4), (2, 3), (3, 4)], ("self", "mat1", "mat2")),
    "addmv": Call(lambda *a, **k: torch.addmv(*a, **k), [(2,), (2, 3), (3,)], ("input", "mat", "vec")),
    "add": Call(lambda a, b: torch.add(a, b), [(3, 3), (3, 3)]),
    "addr": Call(lambda *a, **k: torch.addr(*a, **k), [(2, 3), (2,), (3,)], ("input", "vec1", "vec2")),
    "allclose": Call(lambda a, b: torch.allclose(a, b, rtol=0.5), [(3,), (3,)]),
    "atan2": Call(lambda a, b: torch.atan2(a, b), [(2, 3), (2, 3)]),
    "baddbmm": Call(lambda *a, **k: torch.baddbmm(*a, **k), [(3, 2, 2), (3, 2, 4), (3, 4, 2)], ("input", "batch1", "batch2")),
    "bilinear": Call(lambda *a, **k: F.bilinear(*a, **k), [(2, 3), (2, 4), (5, 3, 4), (5,)], ("input1", "input2", "weight", "bias")),
    "block_diag": Call(lambda a, b: torch.block_diag(a, b), [(2, 3), (1, 3)]),
    "bmm": Call(lambda *a, **k: torch.bmm(*a, **k), [(2, 2, 3), (2, 3, 2)], ("input", "mat2")),
    "bmm_of_a_tensor": Call(lambda s, *a, **k: s.bmm(*a, **k), [(2, 2, 3), (2, 3, 2)], ("self", "mat2")),
    "cat": Call(lambda a, b, c: torch.cat([a, b, c]), [(2, 3), (1, 3), (2, 3)]),
    "cat_of_a_tuple": Call(lambda a, b: torch.cat((a, b)), [(2, 3), (1, 3)]),
    "chain_matmul": Call(lambda a, b, c: torch.chain_matmul(a, b, c), [(2, 3), (3, 4), (4, 2)]),
    "conv1d": Call(lambda a, b: F.conv1d(a, b), [(1, 2, 5), (3, 2, 3)]),
    "conv2d": Call(lambda *a, **k: F.conv2d(*a, **k), [(1, 2, 4, 4), (3, 2, 3, 3), (3,)], ("input", "weight", "bias")),
    "conv_transpose2d": Call(lambda a, b: F.conv_transpose2d(a, b), [(1, 2, 3, 3), (2, 3, 2, 2)]),
    "cosine_similarity": Call(lambda *a, **k: F.cosine_similarity(*a, **k), [(2, 3), (2, 3)], ("x1", "x2")),
    "cross": Call(lambda *a, **k: torch.cross(*a, dim=-1, **k), [(2, 3), (2, 3)], ("input", "other")),
    "cross_entropy": Call(lambda *a, **k: F.cross_entropy(*a, **k), [(4, 3), (4, 3)], ("input", "target")),
    "div": Call(lambda *a, **k: torch.div(*a, **k), [(2, 3), (3,)], ("input", "other")),
    "div_of_a_tensor": Call(lambda s, *a, **k: s.div(*a, **k), [(2, 3), (3,)], ("self", "other")),
    "dot": Call(lambda a, b: torch.dot(a, b), [(3,), (3,)]),
    "einsum": Call(lambda a, b: torch.einsum("ij,jk->ik", a, b), [(2, 3), (3, 4)]),
    "einsum_of_a_list": Call(lambda a, b: torch.einsum("ij,jk->ik", [a, b]), [(2, 3), (3, 4)]),
    "einsum_of_a_product": Call(lambda a, b: torch.einsum("ij,ij->ij", a, b), [(2, 3), (2, 3)]),
    "gaussian_nll_loss": Call(lambda a, b, c: F.gaussian_nll_loss(a, b, c), [(3,), (3,), (3,)]),
    "grid_sample": Call(lambda a, b: F.grid_sample(a, b, align_corners=False), [(1, 2, 4, 4), (1, 3, 3, 2)]),
    "heaviside": Call(lambda *a, **k: torch.heaviside(*a, **k), [(3,), (3,)], ("input", "values")),
    "huber_loss": Call(lambda a, b: F.huber_loss(a, b), [(4,), (4,)]),
    "index_add": Call(lambda a, b: a.index_add(0, torch.tensor([2, 0]), b), [(3, 3), (2, 3)]),
    "index_copy": Call(lambda a, b: torch.index_copy(a, 0, torch.tensor([2, 0]), b), [(3, 3), (2, 3)]),
    "index_put": Call(lambda a, b: torch.index_put(a, (torch.tensor([2, 0]),), b), [(3, 3), (2, 3)]),
    "inner": Call(lambda *a, **k: torch.inner(*a, **k), [(2, 3), (4, 3)], ("input", "other")),
    "isclose": Call(lambda *a, **k: torch.isclose(*a, **k), [(2, 3), (3,)], ("input", "other")),
    "kl_div": Call(lambda a, b: F.kl_div(a, b, reduction="batchmean"), [(2, 3), (2, 3)]),
    "ldexp": Call(lambda *a, **k: torch.ldexp(*a, **k), [(2, 3), (3,)], ("input", "other")),
    "lerp": Call(lambda *a, **k: torch.lerp(*a, **k), [(2, 3), (2, 3), (3,)], ("input", "end", "weight")),
    "lerp_of_a_0dim_weight": Call(lambda a, b, c: torch.lerp(a, b, c), [(3,), (3,), ()]),
    "linalg.cross": Call(lambda *a, **k: torch.linalg.cross(*a, **k), [(2, 3), (2, 3)], ("input", "other")),
    "linalg.multi_dot": Call(lambda a, b, c: torch.linalg.multi_dot([a, b, c]), [(2, 3), (3, 4), (4, 2)]),
    "linalg.vecdot": Call(lambda a, b: torch.linalg.vecdot(a, b), [(2, 3), (2, 3)]),
    "linear": Call(lambda *a, **k: F.linear(*a, **k), [(2, 3), (4, 3), (4,)], ("input", "weight", "bias")),
    "margin_ranking_loss": Call(lambda a, b, c: F.margin_ranking_loss(a, b, c, 0.3), [(3,), (3,), (3,)]),
    "masked_scatter": Call(lambda a, b: a.masked_scatter(_MASK, b), [(3, 3), (5,)]),
    "matmul": Call(lambda *a, **k: torch.matmul(*a, **k), [(2, 3), (3,)], ("input", "other")),
    "matmul_of_an_operator": Call(lambda a, b: a @ b, [(2, 3), (3, 4)]),
    "maximum": Call(lambda a, b: torch.maximum(a, b), [(3, 3), (3, 3)]),
    "meshgrid": Call(lambda a, b: torch.meshgrid(a, b, indexing="ij"), [(2,), (3,)]),
    "mm": Call(lambda *a, **k: torch.mm(*a, **k), [(2, 3), (3, 4)], ("input", "mat2")),
    "mse_loss": Call(lambda a, b: F.mse_loss(a, b), [(3, 3), (3, 3)]),
    "mul": Call(lambda *a, **k: torch.mul(*a, **k), [(2, 3), (3,)], ("input", "other")),
    "mv": Call(lambda *a, **k: torch.mv(*a, **k), [(2, 3), (3,)], ("input", "vec")),
    "poisson_nll_loss": Call(lambda a, b: F.poisson_nll_loss(a, b, full=True), [(3,), (3,)]),
    "prelu": Call(lambda *a, **k: F.prelu(*a, **k), [(2, 3), (3,)], ("input", "weight")),
    "scaled_dot_product_attention": Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [(1, 2, 3, 4)] * 3),
    "scatter": Call(lambda a, b: a.scatter(0, _ROW, b), [(3, 3), (1, 3)]),
    "scatter_add": Call(lambda a, b: torch.scatter_add(a, 0, _ROW, b), [(3, 3), (1, 3)]),
    "scatter_reduce": Call(lambda a, b: a.scatter_reduce(0, _ROW, b, "sum"), [(3, 3), (1, 3)]),
    "smooth_l1_loss": Call(lambda *a, **k: F.smooth_l1_loss(*a, **k), [(4,), (4,)], ("input", "target")),
    "stack": Call(lambda a, b: torch.stack(tensors=[a, b], dim=1), [(2, 3), (2, 3)]),
    "tensordot": Call(lambda a, b: torch.tensordot(a, b, dims=1), [(2, 3), (3, 4)]),
    "trapz": Call(lambda a, b: torch.trapz(a, b), [(4,), (4,)]),
    "triplet_margin_loss": Call(lambda a, b, c: F.triplet_margin_loss(a, b, c), [(2, 3), (2, 3), (2, 3)]),
    "truediv_of_a_reversed_pair": Call(lambda a, b: b.__rtruediv__(a), [(2, 3), (3,)]),
    "vdot": Call(lambda *a, **k: torch.vdot(*a, **k), [(3,), (3,)], ("input", "other")),
}
HABANA, NOTHING = hmp.Policy.load("habana"), hmp.Policy("nothing")
RULES = ("bf16", "fp32", "promote", "bf16 over promote", "fp32 over promote")
# Torch refuses mixed inputs here (torch-surface.md, 2A): under R7 the others become the first one's dtype.
REFUSED = set(
    """
    matmul matmul_of_an_operator mm bmm bmm_of_a_tensor addmm addmm_of_a_tensor baddbmm mv dot inner einsum einsum_of_a_list tensordot
    linalg.multi_dot linear conv1d conv2d conv_transpose2d bilinear lerp lerp_of_a_0dim_weight prelu huber_loss index_add index_copy
    index_put scatter scatter_add scatter_reduce masked_scatter meshgrid allclose cross linalg.cross grid_sample
    scaled_dot_product_attention
    """.split()
)
UNLISTED_BY_HABANA = set(
    """
    index_add index_copy index_put scatter scatter_add scatter_reduce masked_scatter grid_sample huber_loss scaled_dot_product_attention
    """.split()
)


def lists_of(rule: str, op: str) -> hmp.Policy:
    """Lists that put an op under a rule."""
    return hmp.Policy("one op", **{kind: {op} for kind in ("bf16", "fp32", "promote") if kind in rule.split()})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CALLS)
@given(data=st.data())
def test_r1_r2_r3_r4_r7_a_call_gives_what_its_rules_casts_give_by_hand(name: str, data: st.DataObject) -> None:
    call, shapes, names = CALLS[name]
    drawn: list[Leaf] = [data.draw(leaves(shape, any_dtypes, "positive")) for shape in shapes]
    args, kwargs = data.draw(spelled(names, drawn, int(names[0] == "self"))) if names else (tuple(drawn), {})

    def by_hand(dtype: torch.dtype | None) -> Outcome:
        return by_explicit_casts(call, build(args), build(kwargs), dtype)

    lists = [(rule.split()[0], lists_of(rule, name.split("_of_")[0])) for rule in RULES]
    lists += [("first", NOTHING)] if name in REFUSED else []
    lists += [("first", HABANA)] if name in UNLISTED_BY_HABANA else []
    for rule, policy in lists:
        expected = by_hand(target(rule, build(drawn)))
        if expected.error is not None and by_hand(F32).error is None:
            continue  # no kernel for that dtype: R11
        with hmp.casts(policy):
            got = outcome(call, build(args), build(kwargs))
        assert_same(got, expected)


# torch promotes the two exactly by itself (torch-surface.md, 2C, and 2B's "first input" group): on the promote list or on none it is torch.
PROMOTED = {
    "add": lambda a, b: torch.add(a, b),
    "+": operator.add,
    "sub": lambda a, b: torch.sub(a, b, alpha=2),
    "-": operator.sub,
    "mul": lambda a, b: a.mul(b),
    "div": lambda a, b: torch.div(a, b),
    "/": operator.truediv,
    "maximum": lambda a, b: torch.maximum(a, b),
    "fmin": lambda a, b: torch.fmin(a, b),
    "where": lambda a, b: torch.where(a > b, a, b),
    "hypot": lambda a, b: torch.hypot(a, b),
    "remainder": lambda a, b: a % b,
    "eq": lambda a, b: torch.eq(a, b),
    "==": operator.eq,
    "lt": lambda a, b: a < b,
    "gt": lambda a, b: torch.gt(a, b),
    "logical_and": lambda a, b: torch.logical_and(a, b),
    "l1_loss": lambda a, b: F.l1_loss(a, b, reduction="none"),
    "outer": lambda a, b: torch.outer(a.reshape(-1), b.reshape(-1)),
    "cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
}
# On a promote list these are cast, a 0-dim input too: torch computes parts of their gradients in the narrower dtype, or rounds between.
ACCEPTED = {
    "pow": lambda a, b: torch.pow(a, b),
    "**": operator.pow,
    "rtruediv": lambda a, b: b.__rtruediv__(a),
    "equal": lambda a, b: torch.equal(a, b),
    "ldexp": lambda a, b: torch.ldexp(a, b),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, dim=-1),
    "logaddexp": lambda a, b: torch.logaddexp(a, b),
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "float_power": lambda a, b: torch.float_power(a, b),
    "searchsorted": lambda a, b: torch.searchsorted(a.reshape(-1).sort().values, b.reshape(-1)),
    "isin": lambda a, b: torch.isin(a, b),
    "soft_margin_loss": lambda a, b: F.soft_margin_loss(a, b),
}
NATIVE_NAMES = (
    "add sub mul div pow maximum fmin atan2 where addcmul hypot remainder eq lt logical_and mse_loss l1_loss outer "
    "cat concat stack hstack vstack dstack column_stack block_diag"
)
PROMOTE = hmp.Policy("promoted", promote=frozenset(NATIVE_NAMES.split()))
LEFT_BY_HABANA = {"eq", "==", "gt", "equal", "isin", "searchsorted", "logaddexp", "float_power"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*PROMOTED, *ACCEPTED])
@given(tree=pairs(values="positive"))
def test_r3_r7_what_torch_promotes_by_itself_stays_torchs_to_the_bit(name: str, tree: list[Leaf]) -> None:
    """No eq that flips because one side was narrowed (trap U1); integers, float64 and complex included."""
    call = PROMOTED.get(name) or ACCEPTED[name]
    expected = outcome(call, build(tree))
    for policy in (NOTHING, *([PROMOTE] if name in PROMOTED else []), *([HABANA] if name in LEFT_BY_HABANA else [])):
        with hmp.casts(policy):
            got = outcome(call, build(tree))
        assert_same(got, expected)
