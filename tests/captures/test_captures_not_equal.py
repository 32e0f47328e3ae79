"""What must not pass for equal, and is not named too early: NaN, large integers, masks that leave nothing, models that run by turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hmp


class Gives(nn.Module):
    """Returns what it is told to."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> Any:
        return self.value


def gap_of(tmp_path: Path, a: Any, b: Any, **options: Any) -> Any:
    for name, value in (("a", a), ("b", b)):
        with hmp.capture(tmp_path / name, model := Gives(value), **options):
            model(torch.zeros(2, 3))
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    (gap,) = [gap for gap in found.gaps if gap.kind]
    assert (found.first is gap) is bool(gap.relative)
    return gap


INF, NAN, MOST = float("inf"), float("nan"), 3e38


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        *[(1.0, NAN, INF), (NAN, 1.0, INF), (1.0, INF, INF), (INF, NAN, INF), (INF, -INF, INF), (MOST, -MOST, INF), (1.0, MOST, INF)],
        *[(NAN, NAN, 0.0), (-INF, -INF, 0.0), (-INF, -MOST, 0.0)],
    ],
)
def test_what_one_side_alone_has_of_nan_and_infinity_is_no_mask(a: float, b: float, wanted: float, tmp_path: Path) -> None:
    one, other = torch.ones(2, 3), torch.ones(2, 3)
    one[1, 1], other[1, 1] = a, b
    assert gap_of(tmp_path, one, other).relative == wanted


@pytest.mark.parametrize("a", [2**24, 2**60])
def test_integers_that_float32_or_float64_do_not_hold_are_told_apart(a: int, tmp_path: Path) -> None:
    assert 0 < gap_of(tmp_path, torch.tensor([[a]]), torch.tensor([[a + 1]])).relative < 1e-7
    assert 0 < gap_of(tmp_path, *(torch.tensor([[each]], dtype=torch.uint64) for each in (a, a + 1))).relative < 1e-7


@pytest.mark.parametrize(("a", "b"), [(INF, NAN), (INF, -INF), (1e-20, 2e-20)])
def test_what_projections_do_not_tell_is_not_said_to_be_equal(a: float, b: float, tmp_path: Path) -> None:
    one, other = (torch.tensor([[1e3] * 257 + [each]], dtype=torch.float64) for each in (a, b))
    gap = gap_of(tmp_path, one, other, keep="fingerprints")
    assert (gap.relative, gap.why) == (None, "its bits are others, and its projections do not tell by how much")


def test_of_several_models_the_one_that_ran_first_is_named_first(tmp_path: Path) -> None:
    """The first with parameters has no prefix, and runs after one that has none."""
    head = nn.Linear(3, 3)
    for name, scale in (("a", 1.0), ("b", 2.0)):
        with hmp.capture(tmp_path / name):
            head(nn.Threshold(0.0, 0.0)(Gives(torch.ones(2, 3) * scale)(torch.zeros(2, 3))))
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    assert found.first is not None and found.first.module == "Gives"
    assert [gap.module for gap in found.gaps] == ["Gives(inputs)", "Gives", "Threshold(inputs)", "Threshold", "(inputs)", ""]


def test_a_mask_that_leaves_nothing_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    values = torch.ones(2, 3), torch.ones(2, 3) * 7
    with pytest.raises(hmp.HmpError, match=r"no place counts in the rows of a and b: give the captures a mask= that is 1 where one does"):
        gap_of(tmp_path, *values, mask=torch.zeros(2, 3))
    with pytest.raises(hmp.HmpError, match=r"a: the mask= of its capture\(\) is \[4, 3\], and the batch \[2, 3\]; capture again with one"):
        gap_of(tmp_path, *values, mask=torch.ones(4, 3))
    with pytest.raises(hmp.HmpError, match=r"mask= is 1 where a place counts and 0 where none does; another value is in it"):
        gap_of(tmp_path, *values, mask=torch.tensor([[0.0, 0.0, -1e9]] * 2))


def test_a_mask_goes_over_the_input_of_its_shape(tmp_path: Path) -> None:
    """The first input is a picture, whose second dimension is none of places."""

    class Both(nn.Module):
        def forward(self, picture: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return text * 2

    text = torch.randn(2, 5, 4)
    other = text.clone()
    other[:, :2] = 9.0
    for name, each in (("a", text), ("b", other)):
        with hmp.capture(tmp_path / name, model := Both(), mask=torch.tensor([[0, 0, 1, 1, 1]] * 2)):
            model(torch.ones(2, 3, 8, 8), each)
    (gap,) = [gap for gap in hmp.compare_captures(tmp_path / "a", tmp_path / "b").gaps if gap.kind]
    assert gap.relative == 0.0
