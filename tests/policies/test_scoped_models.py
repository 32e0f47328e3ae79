"""List entries with a scope: how they are written, what is refused, what runs in what, and what explain(), check and reports say."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import hmp
from hmp.cli import main


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("softmax @", "'softmax @'"),
        ("softmax @ a b", "expected a glob over module paths after the '@', got 'a b'"),
        ("softmax @ a @ b", "expected a glob over module paths after the '@', got 'a @ b'"),
        ("@ decoder", "expected an op before the '@', got '@ decoder'"),
        ("soft max @ decoder", "expected the name of an op, such as 'linear', got 'soft max'"),
    ],
)
def test_scope_bad_entries_are_refused_with_file_and_line(tmp_path: Path, text: str, said: str):
    file = tmp_path / "fp32.txt"
    file.write_text(f"linear\n{text}\n")
    with pytest.raises(hmp.errors.OpListError) as caught:
        hmp.Policy.from_files(fp32=file)
    assert str(caught.value).startswith(f"{file}:2: ") and said in str(caught.value) and caught.value.line == 2


def test_scope_both_lists_in_one_scope_are_refused_and_in_two_are_not(tmp_path: Path):
    bf16, fp32 = tmp_path / "bf16.txt", tmp_path / "fp32.txt"
    bf16.write_text("linear\nsoftmax @ decoder\n")
    fp32.write_text("softmax\nsoftmax @ decoder\n")
    with pytest.raises(hmp.errors.OpListError) as caught:
        hmp.Policy.from_files(bf16, fp32)
    assert str(caught.value) == (
        f"{bf16}:2: 'softmax @ decoder' is on the BF16 list and on the FP32 list ({fp32}:2); take it off one of them"
    )
    fp32.write_text("softmax\nsoftmax @ encoder\n")
    assert len(hmp.Policy.from_files(bf16, fp32).scoped) == 2
    # BF16 and FP32 win over promote, silently (R4)
    assert hmp.Policy(bf16={"mul @ a"}, promote={"mul @ a"}).scoped


SCOPED = hmp.Policy("mine", bf16={"linear", "softmax", "gelu @ a.?"}, fp32={"softmax @ decoder.*", "*"}, promote={"add @ *"}, fp8={"mm"})


@pytest.mark.parametrize(
    "again",
    [
        lambda policy, folder: hmp.Policy.load(policy.save(folder)),
        lambda policy, folder: hmp.Policy.from_dict(json.loads(json.dumps(policy.to_dict()))),
        lambda policy, folder: pickle.loads(pickle.dumps(policy)),
        lambda policy, folder: copy.deepcopy(policy),
        lambda policy, folder: policy.replace(dtype="float16").replace(dtype="bfloat16"),
        lambda policy, folder: dataclasses.replace(policy, name="another"),
        lambda policy, folder: policy.replace(fp32={"*"}, scoped=()).replace(fp32={"softmax @ decoder.*", "*"}).replace(
            bf16=policy.bf16 | {"gelu @ a.?"}, promote={"add @ *"}),
    ],
    ids=["folder", "dict", "pickle", "deepcopy", "dtype", "dataclasses", "entries"],
)  # fmt: skip
def test_scope_entries_travel_with_the_policy(tmp_path: Path, again):
    found = again(SCOPED, tmp_path)
    assert found == SCOPED and found.fingerprint == SCOPED.fingerprint and len(found.scoped) == 3


def test_scope_needs_a_model(tmp_path: Path):
    (tmp_path / "fp32.txt").write_text("softmax @ decoder\n")
    policy = hmp.Policy("mine", fp32={"softmax @ decoder"})
    for wrong in (lambda: hmp.convert(policy=policy), lambda: hmp.casts(policy)):
        with pytest.raises(hmp.HmpError, match=r"'softmax @ decoder' .*'mine'.* use hmp.apply\(model, policy\)"):
            wrong()
    with pytest.raises(hmp.HmpError, match=r"fp32.txt:1: 'softmax @ decoder' needs a model"):
        hmp.convert(fp32_file_path=tmp_path / "fp32.txt")
    assert not hmp.is_converted()


@pytest.mark.parametrize(
    ("scope", "hint"),
    [
        ("decodr", "did you mean 'decoder'?"),
        ("decoder.1.atention", "did you mean 'decoder.1.attention'?"),
        ("attention", "did you mean '*.attention'?"),
        ("zzz", "it holds 'encoder', 'decoder'"),
    ],
)
def test_scope_that_matches_nothing_is_refused_with_a_near_one(tmp_path: Path, scope: str, hint: str):
    def stack():
        return torch.nn.ModuleList(torch.nn.ModuleDict({"attention": torch.nn.Linear(1, 1)}) for _ in range(2))

    model = torch.nn.ModuleDict({"encoder": stack(), "decoder": stack()})
    (tmp_path / "bf16.txt").write_text("linear\n")
    (tmp_path / "fp32.txt").write_text(f"gelu\nsoftmax @ {scope}\n")
    policy = hmp.Policy.load(tmp_path)
    for wrong in (
        lambda: hmp.apply(model, policy),
        lambda: hmp.convert(policy=policy, model=model),
        lambda: hmp.casts(policy, model=model),
    ):
        with pytest.raises(hmp.errors.OpListError) as caught:
            wrong()
        assert str(caught.value).startswith(f"{tmp_path / 'fp32.txt'}:2: 'softmax @ {scope}' matches no module of ModuleDict")
        assert hint in str(caught.value)
    assert not any("_hmp_applied" in vars(module) for module in model.modules()) and not hmp.is_converted()


# --- on models

LOW, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32
X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Block(torch.nn.Module):
    """A module that notes what linear and softmax gave at its latest call."""

    def __init__(self, reach: Callable[[], torch.nn.Module] | None = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.reach = reach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.seen = y.dtype, torch.softmax(y, -1).dtype
        return y.float() if self.reach is None else self.reach()(y.float())


class Net(torch.nn.Module):
    """An encoder and a decoder of two blocks each, held by containers that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.ModuleList(Block() for _ in range(2))
        self.decoder = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.encoder, *self.decoder):
            x = block(x)
        return x

    def seen(self) -> list[tuple[torch.dtype, torch.dtype]]:
        """What the encoder's and then the decoder's blocks ran in."""
        return [block.seen for block in (*self.encoder, *self.decoder)]


P = hmp.Policy("scoped", bf16={"linear", "softmax"}, fp32={"softmax @ decoder", "linear @ *.1.linear"})
UNDER_P = [(LOW, LOW), (WIDE, LOW), (LOW, WIDE), (WIDE, WIDE)]
UNCAST = [(WIDE, WIDE)] * 4
HALVES = hmp.Policy("halves", dtype=HALF, bf16={"linear", "softmax"})


def ran(model: torch.nn.Module, called: Callable[..., object] | None = None) -> list[tuple[torch.dtype, torch.dtype]]:
    (called or model)(X)
    return model.seen()  # type: ignore[no-any-return, operator]


def test_scope_a_container_that_is_reached_past_and_a_module_that_calls_its_uncle():
    model = Net()
    model.encoder[1].reach = lambda: model.decoder[0].linear  # a grandchild of another branch
    hmp.apply(model, hmp.Policy(bf16={"linear"}, fp32={"linear @ decoder"}))
    with hmp.record() as report:
        model(X)
    rows = {(row.module, row.compute) for row in report.rows if row.op == "linear"}
    # the reached one is itself inside the decoder, whoever calls it
    assert rows == {
        ("encoder.0.linear", "bfloat16"), ("encoder.1.linear", "bfloat16"), ("decoder.0.linear", "float32"),
        ("decoder.1.linear", "float32"),
    }  # fmt: skip


def test_scope_convert_with_a_model_and_nested_conversions():
    model, outside = Net(), Block()
    with hmp.convert(policy=P, model=model):
        assert ran(model) == UNDER_P
        outside(X)
        assert outside.seen == (LOW, LOW) and F.linear(X, X).dtype == LOW
        model.decoder[0](X)  # a call of one module
        assert model.decoder[0].seen == (LOW, WIDE)
        with hmp.convert(policy=HALVES):
            assert ran(model) == [(HALF, HALF)] * 4
            with hmp.convert(policy=P.replace(scoped=P.scoped[:1]), model=model):
                assert ran(model) != UNDER_P
            assert ran(model) == [(HALF, HALF)] * 4
        assert ran(model) == UNDER_P
    assert ran(model) == UNCAST and not hmp.is_converted()
    assert not any(vars(module).get("_hmp_applied") for module in model.modules())


@pytest.mark.parametrize("reentrant", [True, False])
def test_scope_a_checkpoint_recomputes_under_the_line_of_its_module(reentrant: bool):
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.encoder, *self.decoder):
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = hmp.apply(Checkpointed(), P)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        loss = model(X.clone().requires_grad_()).sum()
        for block in (*model.encoder, *model.decoder):
            block.seen = None
        loss.backward()
    assert model.seen() == UNDER_P  # as the recomputation had it


# --- where policies are shown, checked and recorded


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
    message = "inside modules whose path 'decoder' matches (scope not checked): its floating-point inputs are cast to float32 (R2)"
    assert re.search(rf"(?m)^ok .*: softmax @ decoder: {re.escape(message)}", told)
    (folder / "bf16.txt").write_text("linear\nsoftmax @ decoder\nlinear @ decoder\nlinear @ decoder\nrelu @ a b\nnope @ a\n")
    assert main(["check", str(folder), "--problems"]) == 1
    told = capsys.readouterr().out
    for line in (
        "softmax @ decoder: is also on the bf16 list, as 'softmax @ decoder' ",
        "bf16.txt:5: 'relu @ a b': expected a glob over module paths after the '@', got 'a b'",
        "bf16.txt:6: nope @ a: ",
    ):
        assert line in told


def test_scope_the_report_names_the_line_of_each_row(folder: Path):
    policy = hmp.Policy.load(folder).replace(name="mine")
    model = hmp.apply(Net(), policy)
    with hmp.record() as report:
        model(X)
    rows = {row.module.partition(".")[0]: (row.rule, row.source, row.compute) for row in report.rows if row.op == "softmax"}
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
