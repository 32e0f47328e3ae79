"""Distances of tensors and tokens, a call that is made again in float32, ranks that wait for each other, and how numbers are shown.

No public call gives the tensors of which a distance is told, or is one rank of several in one process.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hmp
from hmp.formatting import aligned, duration
from hmp.numerics import distance as distances
from hmp.numerics import ranks, tokens
from hmp.numerics.tokens import Chosen, TokenDistance, token_distance
from hmp.numerics.twice import CallWithLogits, beside_float32

INF, NAN = math.inf, math.nan
MASK = torch.finfo(torch.float32).min


def test_distance() -> None:
    for got, reference, relative, ulps in (
        ([4.0, 3.0], [4.0, 3.0], 0.0, 0.0),
        ([4.0, 0.0], [4.0, 3.0], 3 / 5, 3 / (2.0**-10 + 2.0**-12) ** 0.5),
        ([1.0, -INF], [2.0, -INF], 0.5, 64.0),  # masked in both; at 2 the spacing is 2**-6
        ([1.0, NAN], [2.0, 1.0], INF, INF),
        ([1.0, torch.finfo(torch.bfloat16).min], [2.0, MASK], 0.5, 64.0),
    ):
        assert distances.distance(torch.tensor(got), torch.tensor(reference)) == pytest.approx((relative, ulps))
    for masked in (torch.finfo(torch.float16).min, torch.finfo(torch.float16).min + 64, -INF):  # float16's mask is float32's (R12)
        assert distances.distance(torch.tensor([1.0, masked]).half(), torch.tensor([2.0, MASK])).relative == 0.5
    assert distances.distance(torch.tensor([4e4]).half(), torch.tensor([4e4])).relative < 2.0**-11  # a number where float32 has one
    for alone in (NAN, -INF, 2.0**101):  # what one side alone has instead of a number is not hidden
        whole, broken = torch.tensor([1.0, 2.0]), torch.tensor([1.0, alone])
        for one, other in ((broken, whole), (whole, broken), (torch.tensor([1.0, -alone if alone == alone else INF]), broken)):
            assert distances.distance(one, other) == (INF, INF)
            assert distances.total([(torch.ones(2), torch.ones(2)), (one[1:], other[1:])]) == INF
        assert distances.distance(broken, broken) == (0.0, 0.0)
    reference = torch.tensor([1.0, 2.0**100])  # a number that rounding takes over the limit is none that one side alone has
    assert distances.distance(torch.tensor([1.0, 0.9 * 2.0**100]), reference) == (0.0, 0.0)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25])  # squares of the last two are beyond float32
def test_distance_of_many_elements_is_that_of_float64(scale: float):
    torch.manual_seed(0)
    reference = torch.randn(2048) * scale
    got = reference.bfloat16()
    error, exact = got.double() - reference.double(), reference.double()
    spacing = 2.0 ** (exact.abs().log2().floor() - 7)
    wanted = (float(error.norm() / exact.norm()), float(error.norm() / spacing.norm()))
    assert distances.distance(got, reference) == pytest.approx(wanted, rel=1e-6)


def test_masked_words_are_equal_and_nan_is_infinitely_far() -> None:
    reference = torch.tensor([[0.0, 1.0, -math.inf], [2.0, 1.0, 0.0]])
    chosen = Chosen(torch.tensor([1, 0]), torch.tensor([True, True]), "labels")
    same = token_distance(reference.bfloat16(), reference, chosen)
    assert same is not None and (same.error_max, same.bias, same.kl_max) == (0, 0, 0)
    broken = token_distance(torch.tensor([[0.0, 1.0, -math.inf], [math.nan, 1.0, 0.0]]), reference, chosen)
    assert broken is not None and (broken.error_max, broken.bias, broken.kl_max) == (math.inf, -math.inf, math.inf)
    assert token_distance(reference, reference, chosen._replace(where=torch.tensor([False, False]))) is None


def test_tokens_are_compared_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, chosen = torch.randn(7, 9), Chosen(torch.arange(7), torch.ones(7, dtype=torch.bool), "labels")
    whole = token_distance(reference.bfloat16(), reference, chosen)
    monkeypatch.setattr(tokens, "_CHUNK", 2 * 9)  # the last one is smaller
    parts = token_distance(reference.bfloat16(), reference, chosen)
    assert whole is not None and parts is not None and parts.metrics() == pytest.approx(whole.metrics())


def figures(low: Tensor, wide: Tensor, targets: Tensor) -> list[float]:
    """The metrics of log-probabilities of classes, one row for each target."""
    low, wide = low.double().log_softmax(-1), wide.double().log_softmax(-1)
    errors = (low - wide)[range(len(targets)), targets]
    kl = F.kl_div(low, wide, reduction="batchmean", log_target=True)
    return [float(errors.abs().mean()), float(errors.abs().max()), float(errors.mean()), float(kl)]


class Classifier(nn.Module):
    """All that draws, counts and averages in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_a_call_is_made_twice_and_leaves_no_trace() -> None:
    model, x, y = Classifier(), torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    model.body[1].eval()  # frozen by the user
    watch = CallWithLogits(model.modules(), (x, y))
    F.cross_entropy(model(x), y).backward()
    before = [each.clone() for each in (*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state())]
    call = watch.stop()
    assert call.module is model and not any(module._forward_hooks for module in model.modules())
    with hmp.casts("habana"):
        found = beside_float32(call, hmp.casts("torch-cpu"))
    after = (*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state())
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert [module.training for module in model.modules()] == [True, True, True, False, True, True]
    model.eval()
    with torch.no_grad():
        wide = model(x)
        hidden = model.body[1](F.linear(x.bfloat16(), model.body[0].weight.bfloat16(), model.body[0].bias.bfloat16()))
        low = F.linear(hidden.bfloat16(), model.head.weight.bfloat16(), model.head.bias.bfloat16())
    assert isinstance(found, TokenDistance)
    assert list(found.metrics().values()) == pytest.approx(figures(low, wide, y), rel=1e-4)


@pytest.mark.slow
def test_a_compiled_model_is_watched_from_outside(fresh_compiler: None) -> None:
    model, x, y = Classifier(), torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    graphs: list[Any] = []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph)
    watch = CallWithLogits(nn.ModuleList([compiled]).modules(), (x, y))
    compiled(x)
    assert watch.stop().module is compiled and len(graphs) == 1
    assert beside_float32(watch.stop(), hmp.casts("habana")) is not None


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """A store that this process shares with others, as far as it can tell."""
    found = dist.HashStore()
    monkeypatch.setattr(ranks, "default_store", lambda: found)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(ranks, "SAYS", 0.01)
    monkeypatch.setattr(ranks, "GOES_ON", 0.05)
    return found


def region(store: dist.Store) -> str:
    return f"hmp/nonfinite/{next(ranks._regions) + 1}"  # of the next one


def test_a_rank_that_does_not_come_is_waited_for_and_then_left(store: dist.Store, caplog: pytest.LogCaptureFixture) -> None:
    store.add(f"{region(store)}/entered", 1)
    with caplog.at_level(logging.WARNING, "hmp"), hmp.detect_nonfinite():
        torch.ones(2) + 1
    waiting, left = (record.getMessage() for record in caplog.records)
    assert "waiting for other ranks" in waiting and "going on without them" in left


@hmp.detect_nonfinite()
def ends(by: BaseException) -> None:
    torch.log(-torch.ones(2))
    raise by


@pytest.mark.parametrize("end", [AssertionError("isnan"), SystemExit(0)])
def test_a_finding_is_raised_in_the_place_of_what_came_of_it(store: dist.Store, end: BaseException) -> None:
    with pytest.raises(hmp.NonFiniteError) as raised:
        ends(end)
    assert raised.value.__context__ is end
    assert raised.value.finding.rank == 3
    with pytest.raises(KeyboardInterrupt):  # the user's own
        ends(KeyboardInterrupt())


def test_the_step_that_ends_is_that_of_the_first_optimizer(store: dist.Store) -> None:
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]) for _ in range(2))
    done = 0

    @hmp.detect_nonfinite()
    def loop() -> None:
        nonlocal done
        for _ in range(5):
            first.step()
            second.step()
            done += 1
            if done == 2:
                torch.log(-torch.ones(2))

    with pytest.raises(hmp.NonFiniteError):
        loop()
    assert done == 3  # a whole step more, whose end is the first one's next


@pytest.mark.parametrize(("seconds", "shown"), [(0, "-"), (12.34, "12.3 s"), (0.25, "250 ms"), (2e-6, "2 us"), (5e-8, "0.05 us")])
def test_a_duration_has_three_digits_in_the_largest_unit_that_it_reaches(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_words_are_aligned_left_numbers_right_and_nothing_is_cut() -> None:
    rows = [("op", "calls", "where"), ("a long name → " * 20, "7", "[head]"), ("mm", "12,000", "")]
    wide = len(rows[1][0])
    assert aligned(rows, {0, 2}) == [f"{'op':{wide}}   calls  where", f"{rows[1][0]}       7  [head]", f"{'mm':{wide}}  12,000"]
