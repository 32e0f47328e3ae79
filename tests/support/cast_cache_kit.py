"""A scenario is a function that returns tensors: it must give the same bits with the cast caches as without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hmp
from oracle import tensors

Scenario = Callable[[], Any]
LOW = torch.bfloat16
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
Y = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))


@contextmanager
def caches(on: bool, *, share_above: int = 0) -> Iterator[None]:
    """A process under torch-cpu's policy with every cast shared that a user may have shared, or with no cache at all."""
    if not hmp.is_converted():
        hmp.convert(policy="torch-cpu")  # until the test ends: converting anew for each run would take most of its time
    hmp.clear_cache()
    hmp.set_cache_limit(None if on else 0)
    hmp.set_sharing(share_above if on else 2**62)
    try:
        yield
    finally:
        hmp.clear_cache()
        hmp.set_cache_limit(None)
        hmp.set_sharing(None)


def run(scenario: Scenario, *, cached: bool, share_above: int = 0) -> tuple[list[torch.Tensor], int]:
    """What the scenario returns, and how many casts the caches saved."""
    torch.manual_seed(0)
    with caches(cached, share_above=share_above):
        before = hmp.cache_info().hits
        results = [t.detach().clone() for t in tensors(scenario())]
        return results, hmp.cache_info().hits - before


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want) > 0
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.dtype is other.dtype and one.shape == other.shape, number
        assert torch.equal(torch.nan_to_num(one, -7.0), torch.nan_to_num(other, -7.0)), f"tensor {number}: {one} is not {other}"
        assert torch.equal(one.isnan(), other.isnan()), number


def assert_caches_change_nothing(scenario: Scenario, *, hits: bool = True, share_above: int = 0) -> None:
    """The same bits with the caches as without; `hits` says whether casts must have been saved on the way."""
    want, none = run(scenario, cached=False, share_above=share_above)
    got, saved = run(scenario, cached=True, share_above=share_above)
    assert none == 0
    assert_same_bits(got, want)
    assert saved > 0 or not hits, "no cast was saved: the scenario says nothing about the caches"


def each(cases: Iterable[Any], check: Callable[[Any], None]) -> None:
    """Checks every case in one test, converting torch once for all of them, and names those that fail."""
    failures = []
    for case in cases:
        try:
            check(case)
        except Exception as error:  # whatever a case raises is its failure
            failures.append(f"{case}: {type(error).__name__}: {str(error)[:300]}")
        if not hmp.is_converted():
            hmp.convert(policy="torch-cpu")
    assert not failures, "\n".join(failures)


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))


class Heads(torch.nn.Module):
    """Three products of one activation, with a norm before them, as in attention."""

    def __init__(self, width: int = 16, out: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = torch.nn.LayerNorm(width)
        self.q, self.k, self.v = torch.nn.Linear(width, out), torch.nn.Linear(width, out), torch.nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return torch.nn.functional.scaled_dot_product_attention(self.q(h)[None], self.k(h)[None], self.v(h)[None])[0]


def loss(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor = X) -> torch.Tensor:
    return (model(x).float() - Y).pow(2).mean()


@torch.no_grad()
def look(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor = X) -> torch.Tensor:
    """What the model gives now. Two forwards: where the weights are still good, the second takes the copies of the first."""
    model(x)
    return model(x).float()


def params(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def grads(model: torch.nn.Module) -> list[torch.Tensor]:
    """The gradients, NaN where there is none."""
    return [torch.full_like(p, torch.nan) if p.grad is None else p.grad.clone() for p in model.parameters()]
