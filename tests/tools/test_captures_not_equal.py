"""What must not pass for equal, and is not named too early: NaN, large integers, masks that leave nothing, models that run by turns."""

from __future__ import annotations

import dataclasses
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


def gap_of(tmp_path: Path, a: Any, b: Any) -> Any:
    for name, value in (("a", a), ("b", b)):
        with hmp.capture(tmp_path / name, model := Gives(value)):
            model(torch.zeros(2, 3))
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    (gap,) = [gap for gap in found.gaps if gap.kind]
    assert (found.first is gap) is bool(gap.relative)
    return gap


INF, NAN, MOST = float("inf"), float("nan"), 3e38


ALONE = [(1.0, NAN, INF), (NAN, 1.0, INF), (INF, NAN, INF), (INF, -INF, INF), (MOST, -MOST, INF), (1.0, MOST, INF), (NAN, NAN, 0.0)]


def test_what_one_side_alone_has_of_nan_and_infinity_is_no_mask(tmp_path: Path) -> None:
    for a, b, wanted in (*ALONE, (-INF, -INF, 0.0), (-INF, -MOST, 0.0)):
        one, other = torch.ones(2, 3), torch.ones(2, 3)
        one[1, 1], other[1, 1] = a, b
        assert gap_of(tmp_path, one, other).relative == wanted, (a, b)


def test_integers_that_float32_or_float64_do_not_hold_are_told_apart(tmp_path: Path) -> None:
    for a, dtype in ((2**24, torch.int64), (2**60, torch.int64), (2**60, torch.uint64)):
        assert 0 < gap_of(tmp_path, *(torch.tensor([[each]], dtype=dtype) for each in (a, a + 1))).relative < 1e-7


def test_large_outputs_are_compared_by_their_bits_alone(tmp_path: Path) -> None:
    large = torch.randn(2, 2**20)
    assert gap_of(tmp_path, large, large.clone()).how == "bits"
    other = large.clone()
    other[1, -1] += 1
    for name, value in (("a", large), ("b", other)):
        with hmp.capture(tmp_path / name, model := Gives(value)) as found:
            model(torch.zeros(2, 3))
        assert "the values of 1 output are not stored" in found.notes[0]
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    (gap,) = [gap for gap in found.gaps if gap.kind]
    assert gap.relative is None and "its values differ" in gap.why
    assert found.verdict() == ["they differ, by an unknown amount, in 1 output, first (the model)"]


def test_of_several_models_the_one_that_ran_first_is_named_first(tmp_path: Path) -> None:
    """The first with parameters has no prefix, and runs after one that has none."""
    head = nn.Linear(3, 3)
    for name, scale in (("a", 1.0), ("b", 2.0)):
        with hmp.capture(tmp_path / name):
            head(nn.Threshold(0.0, 0.0)(Gives(torch.ones(2, 3) * scale)(torch.zeros(2, 3))))
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    assert found.first is not None and found.first.module == "Gives"
    assert [gap.module for gap in found.gaps] == ["Gives(inputs)", "Gives", "Threshold(inputs)", "Threshold", "(inputs)", ""]


def test_a_mask_goes_over_the_input_of_its_shape_and_leaves_something(tmp_path: Path) -> None:
    """The first input is a picture, whose second dimension is none of places."""

    class Both(nn.Module):
        def forward(self, picture: torch.Tensor, text: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return text * 2

    text = torch.randn(2, 5, 4)
    other = text.clone()
    other[:, :2] = 9.0
    for name, each, mask in (("a", text, [0, 0, 1, 1, 1]), ("b", other, [0, 0, 1, 1, 1]), ("none", text, [0] * 5)):
        with hmp.capture(tmp_path / name, model := Both()):
            model(torch.ones(2, 3, 8, 8), each, torch.tensor([mask] * 2))
    (gap,) = [gap for gap in hmp.compare_captures(tmp_path / "a", tmp_path / "b").gaps if gap.kind]
    assert gap.relative == 0.0
    with pytest.raises(hmp.HmpError, match="the masks of a and none leave no token in common"):
        hmp.compare_captures(tmp_path / "a", tmp_path / "none")


def test_modules_that_are_not_called_every_time_are_beside_the_same_call_of_the_model(tmp_path: Path) -> None:
    """An expert's first call in one program may be in the second batch."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.experts = nn.Embedding(9, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, input_ids: torch.Tensor, chosen: int, embedded: torch.Tensor | None = None) -> torch.Tensor:
            return self.experts[chosen](self.embed(input_ids) if embedded is None else embedded)

    model, batches = Experts(), [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])]
    for name, chosen in (("a", (0, 1)), ("b", (1, 1))):
        with hmp.capture(tmp_path / name, model):
            for ids, each in zip(batches, chosen, strict=True):
                model(ids, each)
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    assert {gap.module: gap.relative for gap in found.gaps if gap.step == 1 and gap.kind} == {"embed": 0.0, "experts.1": 0.0, "": 0.0}
    assert (found.unmatched_a, found.unmatched_b) == (("experts.0",), ("experts.1",))


def test_what_stands_beside_nothing_or_twice_is_told(tmp_path: Path) -> None:
    one, other = torch.ones(3), torch.zeros(3)
    for folder, value in (("x", {"a.b": one, "a": {"b": other}, "loss": one}), ("y", {"a.b": one, "a": {"b": other}})):
        (tmp_path / folder).mkdir()
        with hmp.capture(tmp_path / folder / "a", model := Gives(value)):
            model(one)
    x, y = tmp_path / "x" / "a", tmp_path / "y" / "a"
    found = hmp.compare_captures(x, y)
    assert found.first is None, "a key with a dot in it is not the key of a dict inside"
    assert "[loss]" in found.notes[-1] and str(x) in found.notes[-1]

    class Each(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [layer(x) for layer in self.values()]

    layers = {"q": nn.Linear(3, 3), "k": nn.Linear(3, 3)}
    for name, keys in (("a", ("q", "k")), ("b", ("q",))):
        with hmp.capture(tmp_path / name, model := Each({key: layers[key] for key in keys})):
            model(one)
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b", map=["k=q"])
    assert any("were mapped to the same name in b" in note and note.endswith(": q, k") for note in found.notes)


def test_that_nothing_could_be_compared_is_no_verdict(tmp_path: Path) -> None:
    for name, value in (("a", torch.ones(3)), ("b", torch.ones(4))):
        with hmp.capture(tmp_path / name, model := nn.Sequential(Gives(value), Gives(torch.ones(2) * len(value)), Gives(object()))):
            model(torch.zeros(1))
        (opaque,) = hmp.types.Capture.load(tmp_path / name).notes
        assert "2 modules returned no tensor" in opaque
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    assert "1 (Gives): by 0.25" in found.verdict()[0] and "1 output before it could not be compared" in found.verdict()[0]
    alone = dataclasses.replace(found, gaps=tuple(gap for gap in found.gaps if gap.relative is None))
    assert "may or may not differ" in alone.verdict()[0]
