"""How much of an output is kept: the same columns in every capture, within bounds; and what few numbers tell of the rest.

No public call shows a hash, a sketch or which columns were drawn alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hmp
from hmp.captures.fingerprint import bits, moments, sampled_columns, sketch
from hmp.captures.renaming import renamer


def mixed(number: int) -> int:
    """The first steps of splitmix64, in Python's integers: files that are there hold what came of these."""
    z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    return (z ^ (z >> 27)) % 2**63


def test_a_smaller_sample_is_a_part_of_a_larger_one_and_is_spread() -> None:
    whole = sampled_columns(1000, 1000)
    assert sorted(whole.tolist()) == list(range(1000))
    assert torch.equal(sampled_columns(1000, 40), whole[:40])
    assert 400 < float(whole[:100].double().mean()) < 600
    assert whole.tolist() == sorted(range(1000), key=mixed)


def test_a_sketch_tells_the_distance_within_a_tenth_also_where_one_column_is_all() -> None:
    a, noise = torch.randn(40, 3, 512), torch.randn(40, 3, 512)
    for outlier in (1.0, 1000.0):
        noise[..., 7] *= outlier
        b = a + 0.01 * noise
        estimated = float((sketch(a) - sketch(b)).norm())
        assert estimated == pytest.approx(float((a.double() - b.double()).norm()), rel=0.15)
    assert torch.equal(sketch(a), sketch(a.clone())), "its signs are no random draws"


def test_moments_are_those_of_float64_over_blocks_of_a_large_tensor() -> None:
    large = torch.randn(1_100_000).half() + 3  # more than one block
    large[17], large[-1] = float("inf"), float("nan")
    wide = large.double()[large.isfinite()]
    found = moments(large)
    assert found == pytest.approx((float(wide.norm()), float(wide.mean()), float(wide.abs().max()), 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_the_hash_is_of_each_bit_and_its_place(dtype: torch.dtype) -> None:
    a = (torch.randn(1_060_000) > 0).to(dtype)
    one = bits(a)
    for place in (0, 1_059_999):
        other = a.clone()
        other[place] = 1 - a[place].int() if dtype is torch.bool else a[place] + 1
        assert bits(other) != one
    swapped = a.clone()
    first, second = int((a == 0).nonzero()[0]), int((a == 1).nonzero()[0])
    swapped[first], swapped[second] = a[second], a[first]
    assert bits(swapped) != one == bits(a.clone())
    raw = [0x3F800000, 0xC0200000 - 2**32]  # 1.0 and -2.5 as signed integers
    assert bits(torch.tensor([1.0, -2.5])) == f"{sum((each + 1) * (mixed(at) | 1) for at, each in enumerate(raw)) % 2**64:016x}"


class Wide(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_values_are_kept_whole_then_a_sample_of_columns_then_none(tmp_path: Path) -> None:
    model, x = Wide(), torch.randn(4, 100)
    for each, all_, kept in [(1600, 9999, 100), (800, 9999, 50), (16, 9999, 1), (15, 9999, 0), (1600, 1599, 0)]:
        with hmp.capture(tmp_path / "a", model, bytes_each=each, bytes_all=all_) as found:
            out = model(x)
        output = found.calls[0].outputs[0]
        assert (output.kept, output.width) == (kept, 100)
        if kept:
            columns = slice(None) if kept == 100 else sampled_columns(100, kept)
            assert torch.equal(found.values(0, 0), out[:, columns])
        if kept < 100:
            assert torch.equal(found.sketch(0, 0), sketch(out))
        assert any("no values are kept, for want of room" in note for note in found.notes) is (kept == 0)


def test_a_capture_of_fingerprints_holds_no_values_and_tells_distances(tmp_path: Path) -> None:
    x = torch.randn(64, 40)
    y = x + 0.01 * torch.randn(64, 40)
    for name, batch in (("a", x), ("b", y)):
        with hmp.capture(tmp_path / name, model := Wide(), keep="fingerprints"):
            model(batch)
    assert all(output.kept == 0 for call in hmp.Capture.load(tmp_path / "a").calls for output in call.outputs)
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    wanted = float((x.double() - y.double()).norm() / y.double().norm())
    assert [gap.how for gap in found.gaps] == ["projections", "projections"]
    assert found.gaps[-1].relative == pytest.approx(wanted, rel=0.15)
    assert any("random projections" in note for note in found.notes)
    with_rows = hmp.compare_captures(tmp_path / "a", tmp_path / "b", rows=(0, 1))
    assert {gap.relative for gap in with_rows.gaps} == {None} and all("were not kept" in gap.why for gap in with_rows.gaps)


def test_a_prefix_is_put_on_and_taken_away() -> None:
    names = ["", "model", "model.layers.0.mlp", "lm_head", "(inputs)"]
    for rules, wanted in [
        (["model.*=*"], ["", "", "layers.0.mlp", "lm_head", "(inputs)"]),
        (["*=engine.*"], ["engine", "engine.model", "engine.model.layers.0.mlp", "engine.lm_head", "(inputs)"]),
        (["model.layers.*=transformer.h.*", "lm_head=head"], ["", "model", "transformer.h.0.mlp", "head", "(inputs)"]),
        (["model.*=*", "layers.*.mlp=h.*.ffn"], ["", "", "h.0.ffn", "lm_head", "(inputs)"]),
    ]:
        assert list(map(renamer(rules, names), names)) == wanted
