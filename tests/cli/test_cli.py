"""`hmp diff`, `lists`, `benchmark`, `compare` and `demo`, and the files of `hmp run`: 0 done, 1 the check failed, 2 wrong use."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

import hmp
from command_kit import RECIPE, python
from hmp.cli import main


def folder(path: Path, bf16: str, dtype: str = "bfloat16") -> str:
    path.mkdir()
    for name, text in (("bf16", bf16), ("fp32", "log"), ("promote", "cat"), ("dtype", dtype)):
        (path / f"{name}.txt").write_text(text + "\n")
    return str(path)


def test_diff_shows_what_is_on_another_list_and_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = folder(tmp_path / "one", "mm\nconv2d"), folder(tmp_path / "other", "mm\ncat", "float16")
    assert main(["diff", one, other]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{one} -> {other}: 3 differences",
        "  (dtype)  bfloat16  -> float16",
        "  cat      promote   -> bf16",
        "  conv2d   bf16      -> unlisted",
    ]


def test_lists_has_a_line_for_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lists"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["preset", "dtype", "bf16", "fp32", "promote", "fp8", "fp32_result", "saved"]
    assert [line.split()[0] for line in lines] == hmp.policies()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["habana-o2"] == ["bfloat16", "13", "1", "0", "0", "0", "0"]
    assert rows["apex-o1"] == ["float16", "26", "53", "19", "0", "0", "0"]
    assert rows["torch-cpu"] == ["the", "same", "as", hmp.Policy.load("torch-cpu").name, "on", "this", "machine"]


def test_benchmark_of_a_recipe_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.py").write_text(RECIPE)
    mine = folder(tmp_path / "mine", "linear")
    options = ["--policies", f"float32,{mine}", "--steps", "3", "--json", "out.json", "--seconds", "0.1"]
    assert main(["benchmark", "recipe.py", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("hmp benchmark: cpu, torch ")
    assert lines[2].split()[:3] == ["policy", "step", "time"]
    assert [line.split()[0] for line in lines[4:6]] == ["float32", mine]
    values = json.loads(Path("out.json").read_text())
    assert [row["name"] for row in values["rows"]] == ["float32", mine]
    assert values["losses_compare"] is True
    assert values["steps"] == 3
    exec(RECIPE, mine := {})
    torch.manual_seed(0)
    model, (batch,) = mine["model"](), mine["batches"]()
    optimizer = mine["optimizer"](model)
    for _ in range(values["untimed_steps"] + 3):
        optimizer.zero_grad()
        loss = mine["loss"](model, batch)
        loss.backward()
        optimizer.step()
    assert values["rows"][0]["loss"] == loss.item()


def test_benchmark_exits_with_one_where_the_step_failed_under_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import hmp\ndef step():\n    if hmp.casts_enabled(): raise ValueError('no casts')\n")
    assert main(["benchmark", str(recipe), "--policies", "float32,habana", "--seconds", "0.1"]) == 1
    assert "\nhabana: ValueError: no casts\n" in capsys.readouterr().out
    recipe.write_text("def step():\n    raise ValueError('never')\n")
    assert main(["benchmark", str(recipe), "--policies", "float32"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f'File "{recipe}", line 2, in step' in err
    assert "hmp benchmark: the step failed under every policy; under 'float32' with ValueError: never" in err


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
    before, traceback = failed.stderr.split("hmp run: report written: out.html\n")
    assert failed.returncode == 1 and "ValueError: as asked for" in traceback
    assert "hmp" not in (before + traceback).replace("hmp-", "")  # the traceback is the script's own
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
