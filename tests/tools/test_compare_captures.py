"""Distances are those of the values in float64; names, rows and places are matched as a user says, or as tokens do; and the page."""

from __future__ import annotations

import json
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
        (ROWS[::-1], side, r"input_ids of whole and other differ, they begin with"),
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
        with hmp.capture(tmp_path / name, model := Scale()):
            model(batch, mask)
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
    a, b = (capture(tmp_path / name, Decoder(), torch.tensor([ids])) for name, ids in (("a", [1, 2, 3]), ("b", [4, 5, 6])))
    with pytest.raises(hmp.HmpError, match=r"input_ids of a and b differ, they begin with \[1, 2, 3\] and \[4, 5, 6\]"):
        hmp.compare_captures(a, b)
    model = nn.Linear(3, 3)
    one, two = capture(tmp_path / "one", model, torch.randn(1, 3)), capture(tmp_path / "two", model, torch.randn(2, 3))
    with pytest.raises(hmp.HmpError, match=r"the first inputs of one and two are of shapes \[1, 3\] and \[2, 3\]; capture both programs"):
        hmp.compare_captures(one, two)


def test_the_result_is_json(tmp_path: Path) -> None:
    ids = torch.randint(1, 50, (2, 6))
    found = hmp.compare_captures(*(capture(tmp_path / name, Decoder(), ids) for name in "ab"))
    values = json.loads(found.to_json(tmp_path / "x.json").read_text())
    assert values["schema_version"] == 1 and len(values["gaps"]) == len(found.gaps)
    assert values["first"] == "embed" and values["gaps"][1]["relative"] == found.gaps[1].relative


def test_a_tuple_that_begins_with_what_the_other_returns_is_beside_it(tmp_path: Path) -> None:
    def returns(form: type, scale: float) -> nn.Module:
        made = nn.Linear(1, 1)
        made.forward = lambda x: (x * scale, x.sum()) if form is tuple else x * scale  # type: ignore[method-assign]
        return made

    x = torch.randn(4, 5, 64)
    for name, form, scale in (("a", tuple, 1.0), ("b", list, 1.01)):
        with hmp.capture(tmp_path / name, model := returns(form, scale)):
            model(x)
    found = hmp.compare_captures(tmp_path / "a", tmp_path / "b")
    (gap,) = [gap for gap in found.gaps if gap.kind]
    assert (gap.how, gap.output) == ("values", "0")
    assert gap.relative == pytest.approx(0.01 / 1.01, rel=1e-4)
