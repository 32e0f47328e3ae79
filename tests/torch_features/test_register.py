"""User functions as ops: the decorators, hmp.register, and dotted names in list files."""

from __future__ import annotations

import inspect
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy

LOW, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32


@hmp.bf16_function
def fused_low(q, k, *, mask=None, parts=()):
    """Docs of it."""
    inside = torch.softmax(q, -1).dtype
    return q.dtype, k.dtype, None if mask is None else mask.dtype, [part.dtype for part in parts], inside


@hmp.fp32_function
def fused_wide(q, k):
    return q.dtype, k.dtype, torch.relu(q).dtype


@hmp.promote_function
def fused_widest(q, *rest):
    return [q.dtype, *(each.dtype for each in rest)]


def ones(dtype, *shape):
    return torch.ones(shape or (2,), dtype=dtype)


def test_register_decorators_cast_where_a_policy_is_in_force():
    arguments = {"mask": ones(torch.bool), "parts": (ones(WIDE), ones(HALF), ones(torch.float64).long())}
    with hmp.casts("habana"):
        low = fused_low(ones(WIDE), ones(HALF), **arguments)
        assert low == (LOW, LOW, torch.bool, [LOW, LOW, torch.int64], LOW)
        assert fused_wide(ones(LOW), ones(torch.int64)) == (WIDE, torch.int64, WIDE)
        assert fused_widest(ones(LOW), ones(WIDE), ones(torch.int64)) == [WIDE, WIDE, torch.int64]
        assert fused_widest(ones(LOW), ones(HALF)) == [WIDE, WIDE]
        assert fused_low(ones(torch.float64), ones(WIDE))[:2] == (torch.float64, WIDE)


def test_register_decorators_do_nothing_elsewhere():
    assert fused_low(ones(WIDE), ones(HALF)) == (WIDE, HALF, None, [], WIDE)
    with hmp.casts("habana"), hmp.disable_casts():
        assert fused_low(ones(WIDE), ones(HALF)) == (WIDE, HALF, None, [], WIDE)
        assert fused_widest(ones(LOW), ones(WIDE)) == [LOW, WIDE]


def test_register_decorated_functions_look_like_themselves():
    assert (fused_low.__name__, fused_low.__doc__) == ("fused_low", "Docs of it.")
    assert list(inspect.signature(fused_low).parameters) == ["q", "k", "mask", "parts"]


@pytest.mark.parametrize("given", [torch.nn.Linear, 3], ids=["a class", "a number"])
def test_register_decorates_functions_alone(given):
    with pytest.raises(hmp.HmpError, match=r"@hmp\.bf16_function expected a function, got"):
        hmp.bf16_function(given)


@pytest.fixture
def library(monkeypatch):
    """A user's package with an op, importable as `users_ops.fused.attention`."""
    package, module = types.ModuleType("users_ops"), types.ModuleType("users_ops.fused")
    package.__path__ = []

    def attention(q, k):
        return q.dtype, k.dtype

    module.attention, package.fused = attention, module
    monkeypatch.setitem(sys.modules, "users_ops", package)
    monkeypatch.setitem(sys.modules, "users_ops.fused", module)
    return module


def test_register_before_and_after_convert(library):
    hmp.convert()
    hmp.register(library, "attention", "bf16")
    assert library.attention(ones(WIDE), ones(WIDE)) == (LOW, LOW)
    with hmp.casts(policy(bf16=["relu"], dtype=HALF)):
        assert library.attention(ones(WIDE), ones(WIDE)) == (HALF, HALF)
    hmp.convert(policy="bert")
    assert library.attention(ones(WIDE), ones(WIDE)) == (LOW, LOW)


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (F, "nosuch", "expected a function of torch.nn.functional, got 'nosuch'; pass the module or class"),
        (torch, 3, "expected a function of torch, got 3; pass the module or class"),
        (F, "relu", "got torch's torch.nn.functional.relu; put 'relu' on a list of the policy instead"),
        (torch.linalg, "inv", "got torch's torch.linalg.inv; put 'linalg.inv' on a list of the policy instead"),
        (torch.Tensor, "__add__", "got torch's Tensor.__add__; put 'add' on a list of the policy instead"),
        (torch, "save", "got torch's torch.save; register a function of your own that calls it"),
    ],
)
def test_register_says_of_what_is_in_torch_what_it_is(owner, name, message):
    with pytest.raises(hmp.HmpError, match=re.escape(message)):
        hmp.register(owner, name, "bf16")
    assert {"relu", "linalg.inv", "add"} == hmp.Policy(bf16={"relu", "linalg.inv", "add"}).bf16, "what it advises is possible"
