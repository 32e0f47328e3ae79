"""`import hmp` waits for nothing, and its names are what they are in whatever order things are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "first",
    ["import hmp.tune.search", "import hmp.benchmark.result", "from hmp.tune.recipe import load", "import hmp.cli, hmp.compat.habana", ""],
)
def test_functions_and_packages_of_one_name_are_told_apart(first: str) -> None:
    code = f"{first}\nimport hmp, inspect\nprint(inspect.isfunction(hmp.tune), inspect.isfunction(hmp.benchmark), hmp.tune.__module__)"
    assert python(code) == "True True hmp.tune"


@pytest.mark.slow
def test_a_compiled_function_may_be_the_first_to_ask(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(
        "import torch, hmp\n"
        "@torch.compile(backend='eager')\n"
        "def f(x):\n    with hmp.disable_casts():\n        return x @ x\n"
        "print(f(torch.ones(2, 2)).dtype)\n"
    )
    assert (
        python(f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({str(tmp_path / 'first.py')!r})") == "torch.float32"
    )
