"""The quick way through the wrapper of an op whose inputs get one dtype: what it must leave to the whole rule."""

import types

import pytest
import torch

from hmp.wrapping import OpRule, op_wrap, rules
from hmp.wrapping.facts import OpFacts


def _inverted(x, inplace=False):
    found = torch.linalg.inv(x)  # has no kernel in bfloat16
    return x.copy_(found) if inplace else found


def _as_torchs(function):
    """The function as if it were torch's: what a user's function raises is not answered by another dtype."""
    return types.FunctionType(function.__code__, {"torch": torch, "__name__": "torch.mine"}, "mine", function.__defaults__)


@pytest.mark.parametrize("kind", [rules.BF16_LIST, rules.PROMOTE, rules.FIRST_INPUT], ids=str)
def test_r11_a_call_that_writes_into_its_input_is_not_run_again_on_a_copy(kind):
    inverted = _as_torchs(_inverted)
    rule = OpRule("inverted", kind, OpFacts(order=("x", "inplace"), inplace_at=1, retries=True))
    x = torch.eye(2, dtype=torch.bfloat16) * 2
    with pytest.raises(RuntimeError) as plain:
        inverted(x, True)
    with pytest.raises(RuntimeError) as error:
        op_wrap(inverted, rule)(x, True)
    assert str(error.value) == str(plain.value)
    assert torch.equal(op_wrap(inverted, rule)(x), inverted(x.float()))  # out of place it is
