"""`hmp run`: options of its names behind the script's name, HMP_POLICY, --detect-nonfinite, and a run that casts nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from command_kit import RUN, python

SCRIPT = """\
import sys, torch
x = torch.full((2, 2), 300.0)
print((x @ x).dtype, (x * x).dtype, sys.argv[1:])
"""
FLOAT32, HABANA = "torch.float32 torch.float32", "torch.bfloat16 torch.bfloat16"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return python(*RUN, *arguments, cwd=folder, **env)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["--policy", "habana", "--", "train.py", "--policy", "ppo"], f"{HABANA} ['--policy', 'ppo']"),
        (["train.py", "--", "--bf16", "-h", "--version"], f"{FLOAT32} ['--', '--bf16', '-h', '--version']"),
        (["-m", "train", "--bf16", "--report=a"], f"{FLOAT32} ['--bf16', '--report=a']"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_the_scripts_passes_through(arguments: list[str], seen: str, folder: Path) -> None:
    done = run(folder, *arguments)
    assert (done.returncode, done.stdout) == (0, f"{seen}\n"), done.stderr


@pytest.mark.slow
def test_the_environment_names_a_policy_and_an_option_wins(folder: Path) -> None:
    assert run(folder, "train.py", HMP_POLICY="habana").stdout.startswith(HABANA)
    (folder / "mine.txt").write_text("mul\n")
    assert run(folder, "--policy", "torch-cpu", "train.py", HMP_POLICY="habana").stdout.startswith("torch.bfloat16 torch.float32")
    assert run(folder, "train.py", HMP_POLICY="").stdout.startswith(FLOAT32)
    wrong = run(folder, "train.py", HMP_POLICY="habanna")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("hmp run: unknown policy 'habanna'; did you mean 'habana'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("-m train", "hmp run --policy autocast -m train"),
        ("train.py --bf16 --report=a --epochs", "hmp run --policy autocast train.py"),
        ("knows_none.py --policy habana", "hmp run --policy autocast knows_none.py"),
        ("fails.py --bf16", ""),
        ("reverts.py --bf16", ""),
        ("plain.py --bf16", ""),
    ],
)
def test_a_run_that_casts_nothing_says_so_and_names_what_may_have_been_meant(arguments: str, told: str, folder: Path) -> None:
    (folder / "plain.py").write_text("print('no torch')\n")
    (folder / "fails.py").write_text(f"{SCRIPT}\nsys.exit(3)\n")
    (folder / "knows_none.py").write_text("import argparse, torch\nargparse.ArgumentParser().parse_args()\n")
    (folder / "reverts.py").write_text("import hmp\nwith hmp.convert():\n    pass\n")
    said = run(folder, *arguments.split()).stderr
    assert told in said and said.count("hmp run: hmp cast nothing") == bool(told), said


FLOAT16 = "import torch\nx = torch.full((2, 2), 300.0).half()\ny = x * x\nprint('went on')\ny = torch.exp(x)\n"


@pytest.mark.slow
def test_nonfinite_numbers_stop_the_script_or_are_logged(folder: Path) -> None:
    (folder / "train.py").write_text(FLOAT16)
    stopped = run(folder, "--detect-nonfinite", "train.py")
    assert (stopped.returncode, stopped.stdout) == (1, "")
    assert "NonFiniteError: `mul` made Inf out of finite inputs: train.py:3" in stopped.stderr.replace(f"{folder}{os.sep}", "")
    logged = run(folder, "--detect-nonfinite=log", "train.py")
    assert (logged.returncode, logged.stdout) == (0, "went on\n")
    assert "`mul` made Inf" in logged.stderr and "`exp` made Inf" in logged.stderr


def test_scoped_entries_apply_in_the_models_that_a_script_calls(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import torch\n"
        "model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.ones(1, 4)\n"
        "print(model[:1](x).dtype, model(x).dtype)\n"
    )
    (folder / "bf16.txt").write_text("linear @ 1\n")
    done = run(folder, "--policy", ".", "train.py")
    assert done.stdout.strip() == "torch.float32 torch.bfloat16", done.stderr
