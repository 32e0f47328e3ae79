"""A function that is given other code stays of its kind, and an exchange that fails leaves nothing behind.

Python 3.13 deprecates giving a function code of another kind; that no such exchange is made is asked of every Python here.
"""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F

import hmp
from hmp.core.patching import patches

pytestmark = pytest.mark.slow
LOW = torch.bfloat16
KINDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


def test_r16_no_function_becomes_one_of_another_kind():
    with hmp.convert():
        exchanged = [(f.__qualname__, before.co_flags & KINDS, f.__code__.co_flags & KINDS) for f, before in patches.swapped_functions()]
    assert len(exchanged) > 100
    assert [name for name, before, now in exchanged if before != now] == []
    assert any(before & inspect.CO_GENERATOR for _, before, _ in exchanged), "none of them tells"


def _plain_code_for_generators(monkeypatch):
    monkeypatch.setattr(patches, "_template", patches._template.__wrapped__)
    monkeypatch.setattr(patches, "_BODIES", {**patches._BODIES, "generator": patches._BODIES["plain"]})
    return "a generator function cannot be given the code of a plain function"


def _refused_by_python(monkeypatch):
    """A function that has closed over one name is given the code of one that has closed over none: Python's own refusal."""
    calling = patches._calling
    target = F.max_pool2d
    assert target.__code__.co_freevars
    monkeypatch.setattr(patches, "_calling", lambda code, to: (lambda: None).__code__ if code is target.__code__ else calling(code, to))
    return "free vars"


@pytest.mark.parametrize("breaking", [_plain_code_for_generators, _refused_by_python])
def test_r16_a_swap_that_fails_leaves_nothing_behind(breaking, torch_differences):
    with pytest.MonkeyPatch.context() as monkeypatch:
        match = breaking(monkeypatch)
        for attempt in (hmp.convert, hmp.convert, lambda: hmp.casts("habana").__enter__(), lambda: hmp.apply(torch.nn.Linear(1, 1))):
            with pytest.raises((hmp.HmpError, ValueError), match=match):
                attempt()
            assert not patches.installed()
            assert torch_differences() == []
    with hmp.convert():
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is LOW


def test_r16_swap_names_the_function_whose_kind_it_would_change(monkeypatch):
    def counting():
        yield 1

    code = counting.__code__
    monkeypatch.setattr(patches, "_calling", lambda code, target: (lambda: None).__code__)
    with pytest.raises(hmp.HmpError, match=r"counting: a generator function cannot be given the code of a plain function"):
        patches.swap(counting, counting)
    assert counting.__code__ is code and not patches.swapped(counting) and not patches.installed()


def test_r16_revert_restores_all_before_it_warns_of_a_foreign_patch(torch_differences):
    """Where warnings are errors too."""
    original = F.dropout2d.__code__
    try:
        hmp.convert()
        F.dropout2d.__code__ = (lambda input, p=0.5, training=True, inplace=False: input).__code__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match=r"torch\.nn\.functional\.dropout2d was patched by somebody else"):
                hmp.revert()
        assert len(torch_differences()) == 1 and not patches.installed()
    finally:
        F.dropout2d.__code__ = original
    assert torch_differences() == []
