"""Scoped lines where policies are shown, checked, recorded and compared, and under other people's trainers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hmp
from hmp.cli import main

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(self.linear(x), -1)
        self.seen = y.dtype
        return y.float()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Part(), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))

    @property
    def seen(self) -> tuple[torch.dtype, torch.dtype]:
        return self.encoder.seen, self.decoder.seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lists = tmp_path / "mine"
    lists.mkdir()
    (lists / "bf16.txt").write_text("linear\nsoftmax\n")
    (lists / "fp32.txt").write_text("exp\n\nsoftmax @ decoder\nsoftmax @ *.linear\n")
    (lists / "promote.txt").write_text("add\n")
    return lists


def test_scope_explain_names_the_lines(folder: Path):
    policy = hmp.Policy.load(folder)
    rule = hmp.explain("special.softmax", policy)
    assert (rule.cast, rule.listed_as) == ("bf16", "softmax")
    lines = ("softmax @ *.linear, on the fp32 list ({}:4)", "softmax @ decoder, on the fp32 list ({}:3)")
    assert rule.scoped == tuple(line.format(folder / "fp32.txt") for line in lines)
    assert f"\n  in some modules: softmax @ decoder, on the fp32 list ({folder / 'fp32.txt'}:3)\n" in str(rule)
    assert "softmax @ decoder" in rule._repr_html_()
    assert hmp.explain("linear", policy).scoped == () and hmp.explain("view", policy).scoped == ()
    assert hmp.explain("gelu", hmp.Policy(fp32={"* @ head"})).scoped == ("* @ head, on the fp32 list",)
    assert hmp.explain("gelu", hmp.Policy(bf16={"gelu"}, fp32={"* @ head"})).scoped == ()  # `*` is for what no entry names
    model = hmp.apply(torch.nn.Sequential(), hmp.Policy(fp32={"softmax @ *"}))
    model.register_forward_pre_hook(lambda *_: seen.append(hmp.explain("softmax").scoped))
    seen: list[tuple[str, ...]] = []
    model(X)
    assert seen == [("softmax @ *, on the fp32 list",)]


def test_scope_check_explains_each_line(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["check", str(folder)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"(?m)^ok .*: softmax: ", told)
    message = "inside modules whose path 'decoder' matches: its floating-point inputs are cast to float32 (R2); at torch.softmax"
    assert re.search(rf"(?m)^ok .*: softmax @ decoder: {re.escape(message)}", told)
    (folder / "bf16.txt").write_text("linear\nsoftmax @ decoder\nlinear @ decoder\nlinear @ decoder\nrelu @ a b\nnope @ a\n")
    assert main(["check", str(folder), "--problems"]) == 1
    told = capsys.readouterr().out
    for line in (
        "softmax @ decoder: is also on the bf16 list, as 'softmax @ decoder' ",
        "bf16.txt:4: linear @ decoder: the same op as 'linear @ decoder' in line 3",
        "bf16.txt:5: 'relu @ a b': expected a glob over module paths after the '@', got 'a b'",
        "bf16.txt:6: nope @ a: ",
    ):
        assert line in told


def test_scope_the_report_names_the_line_of_each_row(folder: Path):
    policy = hmp.Policy.load(folder).replace(name="mine")
    model = hmp.apply(Net(), policy)
    with hmp.record() as report:
        model(X)
    rows = {row.module: (row.rule, row.source, row.compute) for row in report.rows if row.op == "softmax"}
    assert rows == {
        "encoder": ("bf16", f"softmax ({folder / 'bf16.txt'}:2)", "bfloat16"),
        "decoder": ("fp32", f"softmax @ decoder ({folder / 'fp32.txt'}:3)", "float32"),
    }
    assert [hmp.Policy.from_dict(each) for each in report.policies] == [policy]
    assert report.never_called == ["add", "exp", "softmax @ *.linear"]
    assert "softmax @ decoder (mine/fp32.txt:3)" in str(report)
    with hmp.convert(policy=policy, model=hmp.remove(model)), hmp.record() as again:
        model(X)
    assert [row.source for row in again.rows] == [row.source for row in report.rows]
