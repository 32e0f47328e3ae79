"""A functools.partial of a torch builtin, made before convert(), is reached, and is given back on revert()."""

from __future__ import annotations

import copy
import functools
import gc
import pickle

import pytest
import torch

import hmp

pytestmark = pytest.mark.searches_references

X = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


def test_a_partial_made_before_convert_follows_the_policy() -> None:
    product, spectrum = functools.partial(torch.mm, mat2=X), functools.partial(torch.fft.fftn, dim=(0, 1))
    product.note = "kept"  # type: ignore[attr-defined]
    builtin = product.func
    with hmp.casts("habana"):
        assert product(X).dtype is torch.bfloat16
        assert spectrum(X.bfloat16()).dtype is torch.complex64  # R11
        assert copy.deepcopy(product)(X).dtype is torch.bfloat16
        assert pickle.loads(pickle.dumps(spectrum))(X).dtype is torch.complex64
    assert product(X).dtype is torch.float32
    hmp.revert()
    assert product.func is builtin
    assert product.args == () and product.keywords["mat2"] is X and product.note == "kept"  # type: ignore[attr-defined]
    assert product(X).dtype is torch.float32


def test_a_partial_of_something_else_is_left_alone() -> None:
    other = functools.partial(sorted, reverse=True)
    state = other.__reduce__()
    with hmp.convert():
        assert other.__reduce__() == state


@pytest.mark.slow
def test_a_partial_is_not_kept_alive_by_hmp() -> None:
    short_lived = functools.partial(torch.mm, mat2=X)
    hmp.convert()
    gc.collect()  # what earlier tests left
    before = sum(type(o) is functools.partial for o in gc.get_objects())
    del short_lived
    gc.collect()
    assert sum(type(o) is functools.partial for o in gc.get_objects()) == before - 1
    hmp.revert()
