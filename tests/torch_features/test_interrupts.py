"""Ctrl-C while a module is made: hmp starts no thread with casts off because of it; and while torch is patched: hmp.revert() restores it.

Elsewhere it is as with torch.no_grad().
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from thread_kit import in_thread

LISTS = hmp.Policy("LISTS", bf16={"linear"})
x, w = torch.ones(2, 2), torch.ones(2, 2)


class Interrupt(BaseException):
    """An interrupt."""


def test_an_interrupt_while_a_module_is_made_leaves_threads_cast() -> None:
    """R9: casts are off in threads that a constructor starts, and on in those that are started once it has ended, however it ended."""
    hmp.convert(policy=LISTS)

    def check(call: int) -> None:
        assert F.linear(x, w).dtype is torch.bfloat16, f"an interrupt after call {call}"

    def interrupted(call: int) -> bool:
        calls = iter(range(call))

        def after_each_call(frame: object, event: str, arg: object) -> None:
            if event == "c_return" and next(calls, None) is None:
                sys.setprofile(None)
                raise Interrupt

        try:
            sys.setprofile(after_each_call)
            torch.nn.Linear(2, 2)
            return False
        except Interrupt:
            return True
        finally:
            sys.setprofile(None)
            torch.set_grad_enabled(True)  # torch's own no_grad() is left on by an interrupt in it
            in_thread(check, call)

    # what an interrupt leaves of this thread's own state stays in the copied context
    assert not contextvars.copy_context().run(lambda: all(map(interrupted, range(2000))))


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
