"""Ctrl-C while a module is made: hmp starts no thread with casts off because of it. Elsewhere it is as with torch.no_grad()."""

from __future__ import annotations

import contextvars
import sys

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
