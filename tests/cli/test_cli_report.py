"""`hmp run --report` and `hmp compare`: what a script and a recipe did, written to files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

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


def run(folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    return python(*(launcher or ("-m",)), "hmp", "run", "--policy", "habana", *options, cwd=folder)


@pytest.mark.slow
def test_a_report_is_written_however_the_script_ends(tmp_path: Path) -> None:
    ended = run(tmp_path, "--report", "out.json", "script.py")
    assert (ended.returncode, ended.stdout) == (3, "torch.bfloat16\n")
    report = hmp.Report.load(tmp_path / "out.json")
    (linear,) = [row for row in report.rows if row.op == "linear"]
    assert (linear.calls, linear.compute, linear.module, Path(linear.file).name, linear.line) == (1, "bfloat16", "Linear", "script.py", 3)

    failed = run(tmp_path, "--report", "out.html", "script.py", "fail")
    assert failed.returncode == 1
    assert "ValueError: as asked for" in failed.stderr
    assert "hmp" not in failed.stderr.replace("hmp-", "")  # the traceback is the script's own
    assert "linear" in (tmp_path / "out.html").read_text()

    run(tmp_path, "--report", "out.txt", "script.py")
    assert (tmp_path / "out.txt").read_text().startswith("hmp record: policy habana")


@pytest.mark.slow
def test_every_rank_writes_its_own(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    (tmp_path / "ok.py").write_text(SCRIPT.replace("sys.exit(3)", ""))
    ended = run(tmp_path, "--report", "out.json", "ok.py", launcher=launcher)
    assert ended.returncode == 0, ended.stderr
    for name in ("out.json", "out.rank1.json"):
        hmp.Report.load(tmp_path / name)


def test_compare_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    files = tmp_path / "c.json", tmp_path / "c.html"
    assert main(["compare", str(recipe), "--policy", "habana", "--json", str(files[0]), "--html", str(files[1])]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("policy 'habana' against float32, forward and backward of the given loss")
    assert "to move to the FP32 list first: linear (" in shown
    values = json.loads(files[0].read_text())
    assert sorted(row["order"] for row in values["rows"]) == list(range(len(values["rows"])))
    assert {row["op"] for row in values["rows"]} >= {"linear", "softmax", "pow", "mean"}
    assert "linear" in files[1].read_text()


@pytest.mark.parametrize("scoped", [True, False])
def test_compare_in_fp8_shows_the_low_dtype_beside_it(tmp_path: Path, scoped: bool) -> None:
    """The preset's lines for single modules speak of the recipe's model, in both runs."""
    (tmp_path / "recipe.py").write_text(RECIPE.replace("Linear(8, 16)", "Linear(16, 16)").replace("(4, 8)", "(16, 16)"))
    lists = "fp8" if scoped else str(hmp.Policy(fp8={"linear"}, name="mine").save(tmp_path / "lists"))
    file = tmp_path / "c.json"
    assert main(["compare", str(tmp_path / "recipe.py"), "--policy", lists, "--json", str(file)]) == 0
    values = json.loads(file.read_text())
    errors = [
        next(r["isolated"] for r in run["rows"] if (r["op"], r["direction"]) == ("linear", "forward"))
        for run in (values, *values["others"])
    ]
    assert errors[0] > 0.02 > 0.004 > errors[1] > 0


def test_compare_sets_policies_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, file = tmp_path / "recipe.py", tmp_path / "c.json"
    recipe.write_text(RECIPE)
    scoped = hmp.Policy("scoped", bf16={"linear"}, fp32={"linear @ 0"}).save(tmp_path / "scoped")
    arguments = ["compare", str(recipe), "--policy", f"habana,{scoped}", "--against", "gaudi", "--json", str(file)]
    assert main(arguments) == 0
    values = json.loads(file.read_text())
    assert capsys.readouterr().out.startswith(values["verdict"])
    runs = [values, *values["others"]]
    assert [run["policy"] for run in runs] == ["habana", "scoped", "gaudi"]
    low = [{row["module"] for row in run["rows"] if row["op"] == "linear" and row["dtype"] == "bfloat16"} for run in runs]
    assert "model.0" in low[0] and "model.0" not in low[1] and low[1]
    assert main(["compare", str(recipe), "--against", "autocast"]) == 2
    assert "are the same, and nothing would be between them; leave one out" in capsys.readouterr().err


def test_compare_asks_for_the_batches_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.replace("return [torch.randn", "print('asked'); return [torch.randn"))
    assert main(["compare", str(recipe)]) == 0
    assert capsys.readouterr().out.count("asked") == 1


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["none.py"], 2, "no such file"),
        (["ok.py", "--policy", "nope"], 2, "'nope' is no policy"),
        (["ok.py", "--html", "none/c.html"], 2, "there is no such folder"),
    ],
    ids=["file", "policy", "folder"],
)
def test_compare_of_what_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], status: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.py").write_text(RECIPE)
    assert main(["compare", *options]) == status
    assert message in capsys.readouterr().err
