"""List entries with a scope: how they are written, what a policy makes of them, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch

import hmp


def entries(rules) -> list[tuple[str, str | None, int | None]]:
    return [(rule.name, rule.scope, rule.line) for rule in rules]


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
    with pytest.raises(hmp.OpListError) as caught:
        hmp.Policy.from_files(fp32=file)
    assert str(caught.value).startswith(f"{file}:2: ") and said in str(caught.value) and caught.value.line == 2


def test_scope_both_lists_in_one_scope_are_refused_and_in_two_are_not(tmp_path: Path):
    bf16, fp32 = tmp_path / "bf16.txt", tmp_path / "fp32.txt"
    bf16.write_text("linear\nsoftmax @ decoder\n")
    fp32.write_text("softmax\nsoftmax @ decoder\n")
    with pytest.raises(hmp.OpListError) as caught:
        hmp.Policy.from_files(bf16, fp32)
    assert str(caught.value) == (
        f"{bf16}:2: 'softmax @ decoder' is on the BF16 list and on the FP32 list ({fp32}:2); take it off one of them"
    )
    fp32.write_text("special.softmax\nsoftmax @ encoder\ntorch.softmax @ decoder\n")
    with pytest.raises(hmp.OpListError, match=r"'softmax @ decoder' and 'torch.softmax @ decoder' are the same op, which is on"):
        hmp.Policy.from_files(bf16, fp32)
    fp32.write_text("softmax\nsoftmax @ encoder\n")
    assert len(hmp.Policy.from_files(bf16, fp32).scoped) == 2
    # BF16 and FP32 win over promote, silently (R4)
    assert hmp.Policy(bf16={"mul @ a"}, promote={"mul @ a"}).scoped


SCOPED = hmp.Policy("mine", bf16={"linear", "softmax", "gelu @ a.?"}, fp32={"softmax @ decoder.*", "*"}, promote={"add @ *"})


@pytest.mark.parametrize(
    "again",
    [
        lambda policy, folder: hmp.Policy.load(policy.save(folder)),
        lambda policy, folder: hmp.Policy.from_dict(json.loads(json.dumps(policy.to_dict()))),
        lambda policy, folder: pickle.loads(pickle.dumps(policy)),
        lambda policy, folder: copy.deepcopy(policy),
        lambda policy, folder: policy.replace(dtype="float16").replace(dtype="bfloat16"),
        lambda policy, folder: policy.replace(fp32={"*"}, scoped=()).replace(fp32={"softmax @ decoder.*", "*"}).replace(
            bf16=policy.bf16 | {"gelu @ a.?"}, promote={"add @ *"}),
    ],
    ids=["folder", "dict", "pickle", "deepcopy", "dtype", "entries"],
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
    for wrong in (lambda: hmp.convert(policy=policy, model=3), lambda: hmp.casts(policy, model=3)):
        with pytest.raises(hmp.HmpError, match=r"\(model=...\) expected a torch.nn.Module, got int"):
            wrong()


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
        with pytest.raises(hmp.OpListError) as caught:
            wrong()
        assert str(caught.value).startswith(f"{tmp_path / 'fp32.txt'}:2: 'softmax @ {scope}' matches no module of ModuleDict")
        assert hint in str(caught.value)
    assert not any("_hmp_applied" in vars(module) for module in model.modules()) and not hmp.is_converted()
