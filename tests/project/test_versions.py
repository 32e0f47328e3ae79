"""What is said of releases is what `.ci/versions` noted of its runs; workflows are right by actionlint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import doc_blocks
from making import versions
from torch_has import release

ROOT = Path(__file__).resolve().parents[2]
WHOLE = [run for run in versions.results() if run["tests"] == versions.DEFAULT]


def test_the_tables_are_those_of_the_runs() -> None:
    page = versions.PAGE.read_text(encoding="utf-8")
    assert page == versions.with_tables(page), "python docs/making/versions.py writes them, which .ci/versions calls"
    assert versions.runs_table() in page and versions.features_table() in page


def test_the_classifiers_are_the_pythons_that_all_default_tests_were_run_with() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    run_with = {".".join(run["python"].split(".")[:2]) for run in WHOLE if not run["python"].endswith("t")}
    assert set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)) == run_with
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', project)
    assert min(release(run["torch"]) for run in WHOLE) == release(oldest)


def test_a_python_without_its_lock_is_refused_by_name() -> None:
    code = "import sys; sys._is_gil_enabled = lambda: False; import hmp"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "HmpError: " in done.stderr and "PYTHON_GIL=1" in done.stderr


FOLDER = doc_blocks.ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))


def test_actionlint_finds_nothing() -> None:
    found = shutil.which("actionlint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip("actionlint comes with the extra test, for the platforms that it has a wheel for")
    run = subprocess.run([found, *map(str, FILES)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
