"""What two captures differ by is what their values in float64 differ by, matched as a user says; what must not pass for equal does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hmp


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend, self.mix = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x + self.mix(torch.tanh(weights @ self.attend(x)))


class Decoder(nn.Module):
    """A causal decoder without positions, so that a row computes the same wherever its padding stands."""

    def __init__(self, layers: str = "layers", width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.add_module(layers, nn.ModuleList([Block(width) for _ in range(3)]))
        self.head = nn.Linear(width, 50)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        length = input_ids.shape[1]
        causal = torch.ones(length, length).tril().bool()
        seen = causal if attention_mask is None else causal & (attention_mask[:, None, :] > 0)
        weights = torch.zeros(seen.shape).masked_fill(~seen, -1e9).softmax(-1)
        x = self.embed(input_ids)
        for block in next(each for each in self.children() if isinstance(each, nn.ModuleList)):
            x = block(x, weights.to(x.dtype))
        return {"logits": self.head(x)}


def capture(path: Path, model: nn.Module, *args: Any, **kwargs: Any) -> Path:
    with hmp.capture(path, model), torch.no_grad():
        model(*args, **kwargs)
    return path


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def outputs(model: nn.Module, *args: Any) -> dict[str, torch.Tensor]:
    """Each module's first result, by plain hooks."""
    found: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        return lambda _, __, out: found.setdefault(name, out["logits"] if isinstance(out, dict) else out)

    hooks = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    with torch.no_grad():
        model(*args)
    for each in hooks:
        each.remove()
    return found


def test_the_gap_of_every_module_is_that_of_its_values(tmp_path: Path) -> None:
    ids = torch.randint(1, 50, (2, 6))
    model = Decoder()
    a = capture(tmp_path / "a", model, ids)
    exact = outputs(model, ids)
    with torch.no_grad():
        model.layers[1].mix.weight[0] += 0.5
    b = capture(tmp_path / "b", model, ids)
    changed = outputs(model, ids)
    found = hmp.compare_captures(a, b)
    gaps = {gap.module: gap for gap in found.gaps if gap.kind}
    assert list(gaps) == list(exact) and "embed" in gaps
    for name, gap in gaps.items():
        assert gap.relative == pytest.approx(relative(exact[name], changed[name]), rel=1e-5, abs=1e-12)
        assert (gap.relative == 0) is (gap.how == "bits")
    assert found.first == gaps["layers.1.mix"] == found.beyond_rounding
    assert found.last == gaps[""] and found.last.output == "logits"
    assert {name: [gap.module for gap in each] for name, each in found.layers().items()} == {
        "layers.*": ["layers.0", "layers.1", "layers.2"]
    }
    text = str(found)
    assert "They first differ at layers.1.mix (Linear): by " in text
    assert "They do not differ: 13 outputs" in str(hmp.compare_captures(a, a))


def test_weights_in_bfloat16_and_a_policy_over_float32_say_what_each_computed_in(tmp_path: Path) -> None:
    ids, model = torch.randint(1, 50, (2, 6)), Decoder()
    with hmp.casts(hmp.Policy("mine", bf16={"linear", "matmul"})):
        a = capture(tmp_path / "trainer", model, ids)
    b = capture(tmp_path / "server", model.bfloat16(), ids)
    found = hmp.compare_captures(a, b)
    assert (str(found.a), str(found.b)) == ("policy 'mine'", "no policy")
    assert found.computed() == [
        ("embed", "int64 → float32", "int64 → bfloat16", 1),
        ("layers.*.attend", "float32 → bfloat16, float32 weights", "bfloat16", 3),
        ("layers.*.mix", "bfloat16, float32 weights", "bfloat16", 3),
        ("layers.*", "float32", "bfloat16", 3),
        ("head", "float32 → bfloat16, float32 weights", "bfloat16", 1),
    ]
    assert found.first is not None and found.first.module == "embed" and found.first.rounding == 2.0**-8
    assert 0 < found.first.relative < 2.0**-8  # one rounding of the table


def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for at, row in enumerate(rows):
        where = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        ids[at, where], mask[at, where] = torch.tensor(row), 1
    return ids, mask


ROWS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [1, 2], [3, 1, 4, 1]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_that_differ_in_number_order_or_padding_of_rows_are_refused(side: str, tmp_path: Path) -> None:
    model = Decoder()
    whole = capture(tmp_path / "whole", model, *padded(ROWS, side))
    for rows, how, told in (
        (ROWS[:1], side, r"the first inputs of whole and other are of shapes \[4, 6\] and \[1, 3\]; capture both .* same order"),
        (ROWS[::-1], side, r"input_ids of whole and other differ, they begin with \[.*\d\] and \[.*\d\]"),
        (ROWS, "right" if side == "left" else "left", r"input_ids of whole and other differ|leave no token in common"),
    ):
        with pytest.raises(hmp.HmpError, match=told):
            hmp.compare_captures(whole, capture(tmp_path / "other", model, *padded(rows, how)))
    assert hmp.compare_captures(whole, capture(tmp_path / "same", model, *padded(ROWS, side))).first is None


def test_what_padding_holds_does_not_count(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return x * 2

    x, mask = torch.randn(3, 5, 4), torch.tensor([[1, 1, 1, 0, 0]] * 3)
    y = x.clone()
    y[:, 3:] = float("nan")
    y[1, 2] *= 1.5
    for name, batch in (("a", x), ("b", y)):
        capture(tmp_path / name, Scale(), batch, mask)
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    assert found.gaps[-1].relative == pytest.approx(relative(x[:, :3], y[:, :3]), rel=1e-5)


def test_padding_is_left_out_of_outputs_of_every_layout(tmp_path: Path) -> None:
    """Rows first; a row for each token, as routers have; heads before places. Attention's weights, which have places twice, are left."""

    class Layouts(nn.Module):
        def __init__(self, padding: float) -> None:
            super().__init__()
            self.padding = padding

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            x = input_ids.double().where(attention_mask > 0, self.padding)
            return {
                "flat": torch.stack([x, -x], -1).flatten(0, 1),
                "heads": torch.stack([x, 2 * x, 3 * x], 1)[..., None].expand(-1, -1, -1, 7),
                "weights": x[:, None, :, None] * x[:, None, None, :],
                "once": torch.arange(3.0)[None] + self.padding,
                "none": torch.tensor(1.0),
            }

    left = padded(ROWS, "left")
    a, b = capture(tmp_path / "a", Layouts(1.0), *left), capture(tmp_path / "b", Layouts(2.0), *left)
    gaps = {gap.output: gap for gap in hmp.compare_captures(a, b).gaps if gap.kind}
    once = relative(torch.arange(3.0) + 1, torch.arange(3.0) + 2)
    assert {name: gap.relative for name, gap in gaps.items()} == {
        "flat": 0.0, "heads": 0.0, "weights": None, "once": pytest.approx(once), "none": 0.0,
    }  # fmt: skip
    assert "can't be told from what counts" in gaps["weights"].why


def test_names_are_mapped_rule_by_rule(tmp_path: Path) -> None:
    ids, model = torch.randint(1, 50, (2, 6)), Decoder()
    other = nn.ModuleDict({"model": Decoder("blocks")})["model"]
    other.load_state_dict({name.replace("layers.", "blocks."): value for name, value in model.state_dict().items()})
    a, b = capture(tmp_path / "a", model, ids), capture(tmp_path / "b", other, ids)
    found = hmp.compare_captures(a, b)
    assert (found.unmatched_a[0], found.unmatched_b[0], len(found.unmatched_a)) == ("layers.0.attend", "blocks.0.attend", 9)
    for rules in (["layers.*=blocks.*"], {"layers.*.attend": "blocks.*.attend", "layers.*.mix": "blocks.*.mix", "layers.*": "blocks.*"}):
        found = hmp.compare_captures(a, b, map=rules)
        assert (found.unmatched_a, found.unmatched_b, found.first) == ((), (), None)
        assert [(gap.module_a, gap.module) for gap in found.gaps if gap.number == 0][2] == ("layers.0.attend", "blocks.0.attend")


UNMATCHED = [
    ({"map": ["x.*=y.*"]}, r"no module is called x\.\*"),
    ({"map": ["x.*"]}, r"map x\.\*=: expected OLD=NEW"),
    ({"map": ["layers.*=y"]}, r"map layers\.\*=y: expected OLD=NEW with as many"),
    ({"map": ["*=z.*"]}, r"have no module name in common"),
]


def test_what_cannot_be_matched_says_why(tmp_path: Path) -> None:
    a, b = (capture(tmp_path / name, Decoder(), torch.tensor([[1, 2, 3], [4, 5, 6]])) for name in "ab")
    for options, told in UNMATCHED:
        with pytest.raises(hmp.HmpError, match=told):
            hmp.compare_captures(a, b, **options)


def test_a_tuple_that_begins_with_what_the_other_returns_is_beside_it(tmp_path: Path) -> None:
    def returns(form: type, scale: float) -> nn.Module:
        made = nn.Linear(1, 1)
        made.forward = lambda x: (x * scale, x.sum()) if form is tuple else x * scale  # type: ignore[method-assign]
        return made

    x = torch.randn(4, 5, 64)
    for name, form, scale in (("a", tuple, 1.0), ("b", list, 1.01)):
        capture(tmp_path / name, returns(form, scale), x)
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    (gap,) = [gap for gap in found.gaps if gap.kind]
    assert (gap.how, gap.output) == ("values", "0")
    assert gap.relative == pytest.approx(0.01 / 1.01, rel=1e-4)


class Gives(nn.Module):
    """Returns what it is told to."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> Any:
        return self.value


def gap_of(tmp_path: Path, a: Any, b: Any) -> Any:
    for name, value in (("a", a), ("b", b)):
        capture(tmp_path / name, Gives(value), torch.zeros(2, 3))
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
        capture(tmp_path / name, Both(), torch.ones(2, 3, 8, 8), each, torch.tensor([mask] * 2))
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
        capture(tmp_path / folder / "a", Gives(value), one)
    x, y = tmp_path / "x" / "a", tmp_path / "y" / "a"
    found = hmp.compare_captures(x, y)
    assert found.first is None, "a key with a dot in it is not the key of a dict inside"
    assert "[loss]" in found.notes[-1] and str(x) in found.notes[-1]

    class Each(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [layer(x) for layer in self.values()]

    layers = {"q": nn.Linear(3, 3), "k": nn.Linear(3, 3)}
    for name, keys in (("a", ("q", "k")), ("b", ("q",))):
        capture(tmp_path / name, Each({key: layers[key] for key in keys}), one)
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b", map=["k=q"])
    assert any("were mapped to the same name in b" in note and note.endswith(": q, k") for note in found.notes)


def test_that_nothing_could_be_compared_is_no_verdict(tmp_path: Path) -> None:
    for name, value in (("a", torch.ones(3)), ("b", torch.ones(4))):
        capture(tmp_path / name, nn.Sequential(Gives(value), Gives(torch.ones(2) * len(value)), Gives(object())), torch.zeros(1))
        (opaque,) = hmp.types.Capture.load(tmp_path / name).notes
        assert "2 modules returned no tensor" in opaque
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    assert "1 (Gives): by 0.25" in found.verdict()[0] and "1 output before it could not be compared" in found.verdict()[0]
    alone = dataclasses.replace(found, gaps=tuple(gap for gap in found.gaps if gap.relative is None))
    assert "may or may not differ" in alone.verdict()[0]
