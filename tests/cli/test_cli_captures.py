"""`hmp run --capture` writes what an unmodified script's model returned; `hmp compare A B` puts two such files beside each other."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

import hmp
from command_kit import python
from hmp.cli import main

SCRIPT = """\
import sys, torch
torch.manual_seed(0)
model, loss = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)), torch.nn.MSELoss()
for step in range(3):
    x = torch.randn(5, 4)
    out = model(x)
    loss(out, torch.zeros(5, 2)).backward()
    if not step:
        torch.save(out, "out.pt")
sys.exit("as asked for" if "fail" in sys.argv else 0)
"""


def run(folder: Path, *options: str, launcher: tuple[str, ...] = ("-m",)) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    return python(*launcher, "hmp", "run", *options, cwd=folder)


@pytest.mark.slow
def test_the_first_call_of_every_model_is_captured_however_the_script_ends(tmp_path: Path) -> None:
    ended = run(tmp_path, "--capture", "a.capture", "script.py", "fail")
    assert (ended.returncode, ended.stderr) == (1, "as asked for\n"), "a script's own end, and no word of casts: none were asked for"
    found = hmp.Capture.load(tmp_path / "a.capture")
    assert [call.module for call in found.calls] == ["0", "1", "", "(inputs)", "MSELoss", "MSELoss(inputs)"]
    assert torch.equal(found.values(2, 0), torch.load(tmp_path / "out.pt"))


@pytest.mark.slow
def test_a_policy_is_captured_with_it_and_every_rank_writes_its_own(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    ended = run(tmp_path, "--policy", "torch-cpu", "--capture", "a.capture", "--capture-calls", "2", "script.py", launcher=launcher)
    assert ended.returncode == 0, ended.stderr
    for name in ("a.capture", "a.rank1.capture"):
        calls = hmp.Capture.load(tmp_path / name).calls
        assert {call.policy for call in calls} == {hmp.Policy.load("torch-cpu").name}
        assert max(call.step for call in calls) == 1


@pytest.mark.slow
def test_a_script_without_a_model_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("import torch\nprint(torch.ones(2).sum())\n")
    ended = run(tmp_path, "--capture", "a.capture", "none.py")
    said = "hmp run: --capture a.capture was not written: no module of the program was called through model(...) in the region\n"
    assert (ended.returncode, ended.stderr) == (0, said)


@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trainer.capture and server.capture in the current folder: the same layer, whose name and second row differ."""
    monkeypatch.chdir(tmp_path)
    layer, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    for name, key, scale in (("trainer", "dense", 1.0), ("server", "fc", 2.0)):
        x[1] *= scale
        with hmp.capture(f"{name}.capture", model := torch.nn.ModuleDict({key: layer})):
            model[key](x)


def test_two_captures_are_compared(captures: None, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["compare", "trainer.capture", "server.capture", "--map", "dense=fc"]
    assert main([*named, "--json", "out.json", "--html", "out.html"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("trainer beside server: 2 outputs of 2 modules\n") and "they part first at (inputs)[input]: " in printed
    values = json.loads(Path("out.json").read_text())
    assert values["first"] == "(inputs)[input]" and values["gaps"][1]["module"] == "fc"
    assert "<title>trainer beside server</title>" in Path("out.html").read_text()
    assert main([*named, "--row-a", "0", "--row-b", "0", "--json", "-"]) == 0
    assert {gap["relative"] for gap in json.loads(capsys.readouterr().out)["gaps"]} == {0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.capture"], "trainer.capture: two captures are compared, and one is given; give both: hmp compare A.capture B.capture"),
        (["recipe.py", "--map", "a=b"], "recipe.py: two captures are compared, and one is given"),
        (["trainer.capture", "server.capture", "--row-a", "1"], "--row-a and --row-b name a pair; give both, or none"),
        (
            ["trainer.capture", "server.capture", "--policy", "habana"],
            "--policy is for a recipe: what two captures were computed under stands",
        ),
        (["trainer.capture", "none.capture"], "none.capture: there is no such file; hmp.capture() and hmp run --capture write captures"),
        (
            ["trainer.capture", "server.capture"],
            "server.capture have no module's name in common: trainer has dense and server has fc; say which",
        ),
    ],
)
def test_what_cannot_be_compared_is_wrong_use(arguments: list[str], said: str, captures: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hmp compare: ") and said in error
