"""`hmp run --report` and `--capture`, `hmp compare` and `hmp diff`: what a script and a recipe did, in files; two captures side by side."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

import hmp
from command_kit import RECIPE, python
from hmp.cli import main

SCRIPT = """\
import sys, torch
layer = torch.nn.Linear(4, 4)
print(layer(torch.randn(2, 4)).dtype)
if "fail" in sys.argv:
    raise ValueError("as asked for")
sys.exit(3)
"""


def run(folder: Path, *options: str, launcher: tuple[str, ...] = ("-m",)) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "captured.py").write_text(CAPTURED)
    return python(*launcher, "hmp", "run", *options, cwd=folder)


@pytest.mark.slow
def test_a_report_is_written_however_the_script_ends(tmp_path: Path) -> None:
    ended = run(tmp_path, "--policy", "habana", "--report", "out.json", "script.py")
    assert (ended.returncode, ended.stdout) == (3, "torch.bfloat16\n")
    report = hmp.types.Report.load(tmp_path / "out.json")
    assert '"schema_version": 1' in (tmp_path / "out.json").read_text(encoding="utf-8")
    (linear,) = [row for row in report.rows if row.op == "linear"]
    assert (linear.calls, linear.compute, linear.module, Path(linear.file).name, linear.line) == (1, "bfloat16", "Linear", "script.py", 3)

    failed = run(tmp_path, "--policy", "habana", "--report", "out.html", "script.py", "fail")
    assert failed.returncode == 1
    assert "ValueError: as asked for" in failed.stderr
    assert "hmp" not in failed.stderr.replace("hmp-", "")  # the traceback is the script's own
    assert "linear" in (tmp_path / "out.html").read_text()


def test_compare_has_another_policy_beside_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Entries for single modules name those of the recipe's model, in both runs."""
    recipe, file = tmp_path / "recipe.py", tmp_path / "c.json"
    recipe.write_text(RECIPE)
    scoped = hmp.Policy("scoped", bf16={"linear"}, fp32={"linear @ 0"}).save(tmp_path / "scoped")
    arguments = ["compare", str(recipe), "--policy", "habana", "--against", str(scoped), "--json", str(file)]
    assert main(arguments) == 0
    values = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert "By op under habana" in printed and "By module under scoped" in printed
    runs = [values, values["against"]]
    assert [run["policy"] for run in runs] == ["habana", "scoped"]
    low = [{row["module"] for row in run["rows"] if row["op"] == "linear" and row["dtype"] == "bfloat16"} for run in runs]
    assert "0" in low[0] and "0" not in low[1] and low[1]
    assert main(["compare", str(recipe), "--against", "autocast"]) == 2
    assert "is the same policy as" in capsys.readouterr().err


CAPTURED = """\
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


@pytest.mark.slow
def test_a_policy_is_captured_with_it_and_every_rank_writes_its_own(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    ended = run(tmp_path, "--policy", "torch-cpu", "--capture", "a.capture", "captured.py", launcher=launcher)
    assert ended.returncode == 0, ended.stderr
    for name in ("a.capture", "a.rank1.capture"):
        calls = hmp.types.Capture.load(tmp_path / name).calls
        assert {call.policy for call in calls} == {hmp.Policy.load("torch-cpu").name}
        assert {call.step for call in calls} == {0}


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
    named = ["diff", "trainer.capture", "server.capture", "--map", "dense=fc"]
    assert main([*named, "--json", "out.json", "--html", "out.html"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("trainer against server: They first differ at (inputs)[input]: ")
    values = json.loads(Path("out.json").read_text())
    assert (values["schema_version"], values["first"]) == (1, "(inputs)[input]") and values["gaps"][1]["module"] == "fc"
    assert "<title>trainer against server</title>" in Path("out.html").read_text()
    assert main(["diff", "trainer.capture", "trainer.capture", "--json", "same.json"]) == 0
    assert {gap["relative"] for gap in json.loads(Path("same.json").read_text())["gaps"]} == {0}
