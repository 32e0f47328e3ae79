"""R1 and R2: all castable inputs of an op on the BF16 list become the low dtype, of one on the FP32 list float32, wherever they stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from oracle import BF16, CASTABLE, F16, F32, F64, assert_same, left_to_torch, outcome
from strategies import INTEGER, Leaf, build
from trap_kit import policy

DTYPE = {"bf16": BF16, "fp32": F32}
EACH_RULE = pytest.mark.parametrize("rule", DTYPE)


WITH_DTYPE = {
    "torch.softmax": lambda x, d: torch.softmax(x, 0, dtype=d),
    "torch.softmax by position": lambda x, d: torch.softmax(x, 0, d),
    "Tensor.softmax": lambda x, d: x.softmax(0, dtype=d),
    "Tensor.softmax by position": lambda x, d: x.softmax(0, d),
    "F.softmax": lambda x, d: F.softmax(x, 0, dtype=d),
    "F.softmax by position": lambda x, d: F.softmax(x, 0, 3, d),
    "special.softmax": lambda x, d: torch.special.softmax(x, 0, dtype=d),
    "F.log_softmax by position": lambda x, d: F.log_softmax(x, 0, 3, d),
    "torch.log_softmax": lambda x, d: torch.log_softmax(x, dim=0, dtype=d),
    "special.log_softmax": lambda x, d: torch.special.log_softmax(x, 0, dtype=d),
    "sum": lambda x, d: torch.sum(x, dtype=d),
    "cumsum": lambda x, d: x.cumsum(0, dtype=d),
}


@pytest.mark.sampled(4)
@EACH_RULE
@pytest.mark.parametrize("name", WITH_DTYPE)
def test_r1_r2_an_explicit_dtype_wins(name: str, rule: str) -> None:
    leaf = Leaf((5,), F32 if rule == "bf16" else BF16, seed=3)
    with hmp.casts(policy(**{rule: ["softmax", "log_softmax", "sum", "cumsum"]})):
        default = outcome(lambda x: torch.softmax(x, 0), [leaf.build()])
        got = {dtype: outcome(WITH_DTYPE[name], [leaf.build(), dtype]) for dtype in (F32, F64, F16, BF16)}
    assert default.results[0].dtype is DTYPE[rule]
    for dtype, found in got.items():
        assert found.results[0].dtype is dtype
        if not (dtype is BF16 and rule == "bf16"):  # there softmax saturates, which test_r12_masked_scores.py asks
            assert_same(found, outcome(WITH_DTYPE[name], [leaf.build(), dtype]))


OF_INTEGERS = {
    "mul": lambda a, b: torch.mul(a, b),
    "div": lambda a, b: a / b,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "topk": lambda a, b: torch.topk(a, 2),
    "log": lambda a, b: torch.log(b),
    "softmax": lambda a, b: torch.softmax(a, 0),
}


@given(st.sampled_from(INTEGER), st.sampled_from(INTEGER), st.sampled_from(sorted(OF_INTEGERS)), st.integers(0, 99))
def test_r1_r2_integers_and_bools_are_never_cast(one, other, name, seed) -> None:
    """div of two ints is torch's own float32, rounding_mode keeps int64, topk keeps the dtype, softmax of ints still raises."""
    tree = [Leaf((4,), one, seed=seed), Leaf((4,), other, values="positive", seed=seed + 1)]
    expected = outcome(OF_INTEGERS[name], build(tree))
    with hmp.casts("habana"):
        got = outcome(OF_INTEGERS[name], build(tree))
    assert_same(got, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("foreign", [F64, torch.complex64])
@pytest.mark.parametrize("other", [*CASTABLE, torch.int64])
def test_r1_r2_an_op_with_a_float64_or_complex_input_is_left_to_torch(foreign: torch.dtype, other: torch.dtype) -> None:
    tree = [Leaf((3,), foreign, seed=1), Leaf((3,), other, seed=2, values="positive")]
    assert left_to_torch(build(tree))
    for call in (torch.Tensor.__mul__, torch.Tensor.dot, torch.Tensor.div):
        for leaves_ in (tree, tree[::-1]):
            expected = outcome(call, build(leaves_))
            with hmp.casts("habana"):
                got = outcome(lambda a, b, name=call.__name__: getattr(a, name)(b), build(leaves_))
            assert_same(got, expected)
    with hmp.casts("habana"):
        assert bool(torch.isfinite(torch.log(torch.tensor([1e-300], dtype=F64))))


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


@pytest.mark.filterwarnings("ignore:__array_wrap__")
def test_r1_a_foreign_type_still_gets_its_turn_in_an_operator() -> None:
    """`tensor * thing` falls to `thing.__rmul__`: the dunder answers NotImplemented, and so must its wrapper."""

    class Thing:
        def __rmul__(self, other):
            return "thing's"

        __radd__ = __rtruediv__ = __rmatmul__ = __rsub__ = __rmul__

    x = torch.ones(2)
    with hmp.casts("habana"):
        assert {x * Thing(), x + Thing(), x / Thing(), x @ Thing(), x - Thing()} == {"thing's"}
        assert (x * np.float32(1.5)).tolist() == [1.5] * 2
        assert (x + np.ones(2, dtype=np.float32)).tolist() == [2.0] * 2
