"""R16: conversions lie on one another, and a handle takes back its own and whatever came after it."""

from __future__ import annotations

import pytest
import torch

import hmp

pytestmark = pytest.mark.searches_references


def test_r16_handles_taken_back_in_any_order_leave_nothing_in_force():
    first = hmp.convert(policy="habana")
    second = hmp.convert(policy="bert")
    first.revert()  # restores what was in force before it: nothing
    assert not hmp.is_converted()
    second.revert()
    assert not hmp.is_converted()


def test_r16_a_conversion_inside_a_handles_with_ends_with_it():
    with hmp.convert(policy="autocast"):
        with hmp.convert(policy="habana"):
            hmp.convert(policy="bert")
        assert (torch.ones(2, 2) * 2).dtype == torch.float32  # mul is on habana's list alone
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.bfloat16
    assert not hmp.is_converted()
