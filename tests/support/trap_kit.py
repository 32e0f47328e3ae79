"""Each measured trap is one check: it holds under hmp and is violated under the naive caster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import hmp
import naive

Run = Callable[..., AbstractContextManager[Any]]
Check = Callable[[Run], None]


def policy(bf16: Any = (), fp32: Any = (), promote: Any = (), dtype: torch.dtype = torch.bfloat16, name: str = "test") -> hmp.Policy:
    """A policy that holds just these names."""
    return hmp.Policy(name=name, dtype=dtype, bf16=frozenset(bf16), fp32=frozenset(fp32), promote=frozenset(promote))


def under_hmp(**lists: Any) -> AbstractContextManager[Any]:
    """A region of hmp with Habana's lists, or with these."""
    return hmp.casts(policy(**lists) if lists else "habana")


def under_naive(**lists: Any) -> AbstractContextManager[Any]:
    """The same lists under the naive caster."""
    return naive.casts(**{"bf16": (), "fp32": (), "promote": (), **lists}) if lists else naive.casts()


class Traps:
    """The traps of one file, each with the error that shows that the naive caster fell in."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def __call__(self, name: str, naive_raises: type[BaseException] = AssertionError) -> Callable[[Check], Check]:
        def register(check: Check) -> Check:
            self.all.append(pytest.param(check, naive_raises, id=f"{name}-{check.__name__}"))
            return check

        return register

    def tests(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """The two tests of a file: every trap is avoided by hmp, and catches the naive caster."""
        each = pytest.mark.parametrize(("check", "naive_raises"), self.all)

        @each
        def test_trap_is_avoided(check: Check, naive_raises: type[BaseException]) -> None:
            check(under_hmp)

        @each
        def test_trap_catches_the_naive_caster(check: Check, naive_raises: type[BaseException]) -> None:
            with pytest.raises(naive_raises):
                check(under_naive)

        return test_trap_is_avoided, test_trap_catches_the_naive_caster


def refused(write: Callable[[], Any]) -> None:
    """Assert that hmp refuses a write that would be lost, with an error that names the remedy."""
    try:
        write()
    except hmp.HmpError as error:
        assert any(remedy in str(error) for remedy in ("disable_casts", "clone", "list")), error
    else:
        raise AssertionError("the write went to a copy and nobody said so")


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert the same dtype, shape and bits."""
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert torch.equal(a.detach(), b.detach()), (a, b)
