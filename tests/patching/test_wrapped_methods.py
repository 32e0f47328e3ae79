"""Classes whose methods wrap one of torch's builtins: the wrapper is the user's, and stays."""

import functools

import pytest
import torch

import hmp
from trap_kit import policy

pytestmark = pytest.mark.searches_references
BF16 = torch.bfloat16


def _taking_defaults(method):
    @functools.wraps(method)
    def wrapper(*args):
        return method(*args)

    return wrapper


def test_r16_a_method_that_wraps_a_builtin_stays_the_users(monkeypatch):
    hmp.revert()

    class Acts:
        @functools.wraps(torch.tanh)
        def doubled(x):
            return torch.tanh(x) * 2

        @_taking_defaults
        def given(self, x, act=torch.tanh):
            return act(x)

    monkeypatch.setitem(globals(), "Acts", Acts)
    before = dict(vars(Acts))
    x = torch.ones(2)
    with hmp.convert(policy=policy(bf16=["tanh"])):
        assert torch.equal(Acts.doubled(x), x.to(BF16).tanh() * 2) and torch.equal(Acts().given(x), x.to(BF16).tanh())
    hmp.revert()
    assert dict(vars(Acts)) == before and before["given"].__wrapped__.__defaults__ == (torch.tanh,)
    assert before["given"].__wrapped__.__defaults__[0] is torch.tanh
