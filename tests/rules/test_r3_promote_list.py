"""R3: all castable inputs become the widest dtype among them; a 0-dim tensor widens no tensor that has dimensions."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

import hmp
from hmp.ops import op_facts
from oracle import BF16, F16, F32, assert_identical, assert_same, by_explicit_casts, outcome
from strategies import Leaf, build


def wide(*names: str) -> hmp.Policy:
    return hmp.Policy(name="r3", bf16=frozenset(), fp32=frozenset(), promote=frozenset(names))


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


def test_r3_a_stand_in_for_torch_xla_is_no_error(monkeypatch):
    """importlib.util.find_spec() raises for a module without a spec, such as documentation builds put into sys.modules."""
    monkeypatch.setitem(sys.modules, "torch_xla", types.ModuleType("torch_xla"))
    spec = importlib.util.spec_from_file_location("hmp.ops.once_more", op_facts.__file__)
    once_more = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(once_more)
    assert "where" not in once_more.PROMOTED_WHOLLY


EXPLICIT_DTYPES = {
    "torch.softmax": lambda x: torch.softmax(x, -1, dtype=F32),
    "x.softmax": lambda x: x.softmax(-1, F32),
    "log_softmax": lambda x: torch.log_softmax(x, -1, dtype=F32),
    "sum": lambda x: x.sum(dtype=F32),
    "mean": lambda x: torch.mean(x, 0, dtype=F32),
}


@pytest.mark.parametrize("name", EXPLICIT_DTYPES)
def test_r3_an_explicit_dtype_wins_on_a_promote_list(name: str) -> None:
    x = torch.randn(3, 3, dtype=BF16)
    with hmp.casts(hmp.Policy("promote", promote={"softmax", "log_softmax", "sum", "mean"})):
        got = EXPLICIT_DTYPES[name](x)
    assert_identical(got, EXPLICIT_DTYPES[name](x), name)
