"""Distances of tensors and tokens, how numbers are shown, what few numbers tell of an output, and names that are rewritten.

No public call gives the tensors of which a distance is told, or shows a hash or a renamed name alone.
"""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from hmp.tools.compare import comparison
from hmp.tools.compare import distance as distances
from hmp.tools.compare.comparison import token_distance
from hmp.tools.formatting import duration, share
from hmp.tools.traces.compare import renamer
from hmp.tools.traces.file import bits

INF, NAN = math.inf, math.nan
MASK = torch.finfo(torch.float32).min


def test_distance() -> None:
    for got, reference, relative in (
        ([4.0, 3.0], [4.0, 3.0], 0.0),
        ([4.0, 0.0], [4.0, 3.0], 3 / 5),
        ([1.0, -INF], [2.0, -INF], 0.5),  # masked in both
        ([1.0, NAN], [2.0, 1.0], INF),
        ([1.0, torch.finfo(torch.bfloat16).min], [2.0, MASK], 0.5),
    ):
        assert distances.distance(torch.tensor(got), torch.tensor(reference)) == pytest.approx(relative)
    for masked in (torch.finfo(torch.float16).min, torch.finfo(torch.float16).min + 64, -INF):  # float16's mask is float32's (R12)
        assert distances.distance(torch.tensor([1.0, masked]).half(), torch.tensor([2.0, MASK])) == 0.5
    assert distances.distance(torch.tensor([4e4]).half(), torch.tensor([4e4])) < 2.0**-11  # a number where float32 has one
    for alone in (NAN, -INF, 2.0**101):  # what one side alone has instead of a number is not hidden
        assert distances.total([(torch.ones(2), torch.ones(2)), (torch.ones(1), torch.tensor([alone]))]) == INF
    reference = torch.tensor([1.0, 2.0**100])  # a number that rounding takes over the limit is none that one side alone has
    assert distances.distance(torch.tensor([1.0, 0.9 * 2.0**100]), reference) == 0.0


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25])  # squares of the last two are beyond float32
def test_distance_of_many_elements_is_that_of_float64(scale: float):
    torch.manual_seed(0)
    reference = torch.randn(2048) * scale
    got = reference.bfloat16()
    error, exact = got.double() - reference.double(), reference.double()
    assert distances.distance(got, reference) == pytest.approx(float(error.norm() / exact.norm()), rel=1e-6)


def test_masked_words_are_equal_and_nan_is_infinitely_far() -> None:
    reference = torch.tensor([[0.0, 1.0, -math.inf], [2.0, 1.0, 0.0]])
    chosen = torch.tensor([1, 0]), torch.tensor([True, True]), "labels"
    same = token_distance(reference.bfloat16(), reference, *chosen)
    assert same is not None and (same.error_max, same.kl_max) == (0, 0)
    broken = token_distance(torch.tensor([[0.0, 1.0, -math.inf], [math.nan, 1.0, 0.0]]), reference, *chosen)
    assert broken is not None and (broken.error_max, broken.kl_max) == (math.inf, math.inf)
    assert token_distance(reference, reference, chosen[0], torch.tensor([False, False]), "labels") is None


def test_tokens_are_compared_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, chosen = torch.randn(7, 9), (torch.arange(7), torch.ones(7, dtype=torch.bool), "labels")
    whole = token_distance(reference.bfloat16(), reference, *chosen)
    monkeypatch.setattr(comparison, "_CHUNK", 2 * 9)  # the last one is smaller
    parts = token_distance(reference.bfloat16(), reference, *chosen)
    assert whole is not None and parts is not None
    assert (parts.tokens, parts.of) == (7, "labels")
    numbers = [(each.reference, each.error_mean, each.error_max, each.kl_mean, each.kl_max) for each in (whole, parts)]
    assert numbers[0] == pytest.approx(numbers[1])


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "-"), (12.34, "12.3 s"), (0.25, "250 ms"), (0.0994, "99.4 ms"), (2e-6, "2 us"), (5e-8, "0.05 us")]
)
def test_a_duration_has_three_digits_in_the_largest_unit_that_it_reaches(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(("percent", "shown"), [(0, "0 %"), (0.05, "< 0.1 %"), (0.14, "0.1 %"), (9.94, "9.9 %"), (12.4, "12 %")])
def test_a_share_has_two_digits_and_nothing_that_is_something_is_0(percent: float, shown: str) -> None:
    assert share(percent * 7, 700) == shown and share(percent, 0) == "-"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_the_hash_is_of_each_byte_and_its_place(dtype: torch.dtype) -> None:
    a = (torch.randn(4, 1000) > 0).to(dtype)
    other = a.clone()
    other[-1, -1] = 1 - a[-1, -1].int() if dtype is torch.bool else a[-1, -1] + 1
    assert bits(other) != bits(a) == bits(a.T.contiguous().T), "the order of elements counts, and not that of memory"
    assert bits(torch.empty(0)) and bits(torch.tensor(1.0)) == hashlib.blake2b(b"\0\0\x80\x3f", digest_size=16).hexdigest()


def test_a_prefix_is_put_on_and_taken_away() -> None:
    names = ["", "model", "model.layers.0.mlp", "lm_head", "(inputs)"]
    for rules, wanted in [
        (["model.*=*"], ["", "", "layers.0.mlp", "lm_head", "(inputs)"]),
        (["*=engine.*"], ["engine", "engine.model", "engine.model.layers.0.mlp", "engine.lm_head", "(inputs)"]),
        (["model.layers.*=transformer.h.*", "lm_head=head"], ["", "model", "transformer.h.0.mlp", "head", "(inputs)"]),
        (["model.*=*", "layers.*.mlp=h.*.ffn"], ["", "", "h.0.ffn", "lm_head", "(inputs)"]),
    ]:
        assert list(map(renamer(rules, names), names)) == wanted
