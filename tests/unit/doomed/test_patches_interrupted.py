"""R16: an interrupt (Ctrl-C) between a patch and its record, or between an undoing and the record's end, leaves nothing for good."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp

pytestmark = pytest.mark.slow


class Interrupt(BaseException):
    """What a signal's handler raises; nothing catches it by another name."""


@contextmanager
def interrupted(at: int, builtin: str, inside: str) -> Iterator[None]:
    """Raises Interrupt as the `at`th call of a builtin in a function returns: where Python looks for signals. It must have come to that."""
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "c_return" and argument.__name__ == builtin and frame.f_code.co_name == inside and "hmp" in frame.f_code.co_filename:
            calls += 1
            if calls == at:
                sys.setprofile(None)
                raise Interrupt

    sys.setprofile(profile)
    try:
        with pytest.raises(Interrupt):
            yield
    finally:
        sys.setprofile(None)


def _is_plain(torch_differences: Callable[[], list[str]]) -> None:
    hmp.revert()
    assert not hmp.is_converted()
    assert torch_differences() == []
    x = torch.randn(2, 2)
    with hmp.convert(policy="torch-cpu"):
        assert F.linear(x, x).dtype is (x @ x).dtype is torch.bfloat16
    hmp.revert()
    assert F.linear(x, x).dtype is torch.float32
    assert torch_differences() == []


@pytest.mark.parametrize("at", [1, 100, 700])
def test_convert_interrupted_right_after_a_name_was_set(at: int, torch_differences: Callable[[], list[str]]) -> None:
    with interrupted(at, "setattr", "write"):
        hmp.convert(policy="torch-cpu")
    _is_plain(torch_differences)


@pytest.mark.parametrize(
    ("builtin", "inside", "at"),
    [
        ("setattr", "write", 1),
        ("setattr", "write", 300),
        ("delattr", "write", 1),
        ("pop", "restore", 20),
        ("pop", "restore", 600),
        ("pop", "restore", 1),
        ("remove", "<lambda>", 1),
    ],
)
def test_revert_interrupted_right_after_a_name_was_put_back(
    builtin: str, inside: str, at: int, torch_differences: Callable[[], list[str]]
) -> None:
    hmp.convert(policy="torch-cpu")
    F.linear(torch.ones(2, 2), torch.ones(2, 2))
    with interrupted(at, builtin, inside):
        hmp.revert()
    _is_plain(torch_differences)
