"""The list of what is kept packed: as a file, in a policy, in scopes, and in what is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hmp
from hmp.cli import main
from saved_oracle import bytes_of, only_what_is_new, packs


def test_r22_a_list_is_read_kept_beside_the_others_and_written_again(tmp_path: Path) -> None:
    (tmp_path / "saved.txt").write_text("gelu\nlinear @ *.mlp\n")
    (tmp_path / "saved_recipe.txt").write_text("int8\n")
    (tmp_path / "base.txt").write_text("habana\n")
    policy, habana = hmp.Policy.load(tmp_path), hmp.Policy.load("habana")
    assert policy.entries("saved") == ["gelu", "linear @ *.mlp"] and policy.saved_recipe == "int8"
    assert [policy.entries(cast) for cast in habana.lists] == [habana.entries(cast) for cast in habana.lists]  # takes nothing from these
    assert hmp.Policy.load(policy.save(tmp_path / "again")) == policy == hmp.Policy.from_dict(policy.to_dict())
    kept = {"gelu (saved)": ("saved", None), "linear @ *.mlp (saved)": ("saved", None)}
    assert policy.diff("habana") == {"(saved recipe)": ("int8", "fp8"), **kept}
    assert policy.fingerprint != policy.replace(saved_recipe="fp8").fingerprint
    habana.save(tmp_path / "again")
    assert not (tmp_path / "again" / "saved.txt").exists() and not (tmp_path / "again" / "saved_recipe.txt").exists()
    with pytest.raises(hmp.HmpError, match=r"saved_recipe= expected .*, got 'int4'"):
        policy.replace(saved_recipe="int4")


@packs
def test_r22_a_scoped_line_packs_in_its_modules_alone() -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("here", "there")})
    policy = hmp.Policy("scoped", saved={"linear @ here"})

    def run(name: str) -> int:
        x = torch.randn(64, 64, requires_grad=True)
        kept, _ = bytes_of(lambda: (model[name](x * 2), model["here"](torch.ones(64, 64)))[0], known)
        return kept

    with only_what_is_new() as known, hmp.casts(policy, model=model):
        run("here")  # a thread's first packing gets memory that is used again
        assert run("here") < 64 * 64 * 1.1 and run("there") == 64 * 64 * 4


def test_r22_what_cannot_be_packed_is_an_error_that_says_why_and_nothing_kept_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "saved.txt").write_text("gelu\nadd\nsqrt_\nlinalg.solve\namax\n*\n")
    assert main(["check", str(tmp_path)]) == 1
    told = capsys.readouterr().out.splitlines()
    found = {line.split(": ")[1]: line.split()[0] for line in told if "saved.txt:" in line}
    assert found == {"gelu": "ok", "add": "note", "sqrt_": "error", "linalg.solve": "error", "amax": "error", "*": "ok"}
    for name in ("log", "torch.nn.utils.parametrize.cached"):
        with pytest.raises(hmp.OpListError, match=name):
            hmp.Policy(saved={name})
    assert "packed as int8 (R22)" in str(hmp.explain("gelu", "saved8"))


@packs
@pytest.mark.native_kernels  # computed in float32, the op saves a copy of the weight
def test_r22_a_recording_adds_up_what_was_kept() -> None:
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(128, 64)
    hmp.apply(model, hmp.Policy("packed", bf16={"linear"}, saved={"linear", "gelu"}))
    with hmp.record() as report:
        model(x).float().sum().backward()
    rows = {(row.op, row.module): row for row in report.kept}
    # a float32 batch as its bfloat16 copy; the second layer's weight in bfloat16, of which nothing is left
    assert rows["linear", "0"].nbytes == 128 * 64 * 2 and rows["gelu", "1"].nbytes == 128 * 128 * 2
    assert rows["linear", "2"].nbytes == 128 * 128 * 2 + 64 * 128 * 2
    assert rows["gelu", "1"].left == 128 * 128 * 129 // 128 and 0.01 < rows["gelu", "1"].error < 0.04
    assert hmp.Report.from_dict(report.to_dict()).kept == report.kept and report.merge(report).kept[0].tensors == 2
    assert "Packed activations" in str(report)
