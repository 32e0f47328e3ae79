"""Ctrl-C while torch is patched: hmp.revert() restores it.

Elsewhere it is as with torch.no_grad().
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp

x, w = torch.ones(2, 2), torch.ones(2, 2)


class Interrupt(BaseException):
    """An interrupt."""


def interrupted(work: Callable[[], Any], at: float) -> None:
    """Runs `work` with an interrupt where a call of a builtin by hmp's patching returns, as Python looks for signals there.

    `at` says which of these calls it is, as a part of all of them.
    """
    calls, last = 0, sys.maxsize

    def after_each_call(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        if event == "c_return" and "patching" in frame.f_code.co_filename:
            calls += 1
            if calls == last:
                sys.setprofile(None)
                raise Interrupt

    def run() -> None:
        sys.setprofile(after_each_call)
        try:
            work()
        finally:
            sys.setprofile(None)

    work()  # which calls more the first time
    run()
    last, calls = max(1, int(at * calls)), 0
    with pytest.raises(Interrupt):
        run()


@pytest.mark.slow
@pytest.mark.parametrize("at", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_a_conversion_or_a_revert_that_is_interrupted_is_taken_back_by_revert(
    at: float, torch_differences: Callable[[], list[str]]
) -> None:
    def convert() -> None:
        hmp.revert()
        hmp.convert(policy="torch-cpu")

    for work in (convert, lambda: (convert(), hmp.revert())):
        interrupted(work, at)
        hmp.revert()
        assert torch_differences() == []
        with hmp.convert(policy="torch-cpu"):
            assert F.linear(x, w).dtype is (x @ x).dtype is torch.bfloat16
        hmp.revert()
        assert torch_differences() == [] and F.linear(x, w).dtype is torch.float32
