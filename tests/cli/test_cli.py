"""The command line: exit status 0 done, 1 the check failed, 2 wrong use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hmp
from command_kit import RECIPE
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


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs hmp benchmark; gives its exit status and what it printed, to stdout and to stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.delitem(sys.modules, "hmp_recipe", raising=False)
        status = main(["benchmark", *map(str, arguments), "--seconds", "0.1"])
        return status, *capsys.readouterr()

    return run


def test_benchmark_of_a_recipe_prints_a_table_and_writes_json(tmp_path: Path, benchmark: Callable[..., tuple[int, str, str]]) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    mine = folder(tmp_path / "mine", "linear")
    status, out, err = benchmark(tmp_path / "recipe.py", "--policies", f"float32,{mine}", "--steps", "3", "--json", tmp_path / "out.json")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("hmp benchmark: cpu, torch ")
    assert lines[2].split()[:3] == ["policy", "step", "time"]
    assert [line.split()[0] for line in lines[4:6]] == ["float32", mine]
    values = json.loads((tmp_path / "out.json").read_text())
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


def test_benchmark_exits_with_one_where_the_step_failed_under_a_policy(
    tmp_path: Path, benchmark: Callable[..., tuple[int, str, str]]
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import hmp\ndef step():\n    if hmp.casts_enabled(): raise ValueError('no casts')\n")
    status, out, _ = benchmark(recipe, "--policies", "float32,habana")
    assert status == 1
    assert "\nhabana: ValueError: no casts\n" in out
    recipe.write_text("def step():\n    raise ValueError('never')\n")
    status, out, err = benchmark(recipe, "--policies", "float32")
    assert (status, out) == (1, "")
    assert f'File "{recipe}", line 2, in step' in err
    assert "hmp benchmark: the step failed under every policy; under 'float32' with ValueError: never" in err
