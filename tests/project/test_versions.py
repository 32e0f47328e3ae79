"""What is said of releases and made for the site is what the runs noted and the code has; workflows are right by actionlint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import doc_blocks
import hmp
import hmp.types
from making import completed, presets, releases, versions
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


def test_actionlint_finds_nothing() -> None:
    found = shutil.which("actionlint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip("actionlint comes with the extra test, for the platforms that it has a wheel for")
    files = (doc_blocks.ROOT / ".github" / "workflows").glob("*.yml")
    run = subprocess.run([found, *map(str, files)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_page_of_releases_is_that_of_the_runs_and_none_fails() -> None:
    page = releases.page()
    assert releases.PAGE.read_text(encoding="utf-8") == page, "python docs/making/releases.py writes it, which .ci/releases calls"
    for table in (doc_blocks.ROOT / "tests" / "releases").glob("*.txt"):
        wanted = re.findall(r"^([^#:\n]+):", table.read_text(encoding="utf-8"), re.MULTILINE)
        assert [name for name in wanted if name != "hidden" and f"\n| {name} | " not in page] == []
    assert "fails" not in page


def test_the_api_page_has_every_public_name() -> None:
    text = (doc_blocks.PAGES / "reference" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: (\S+)$", completed(text, "reference/api.md"), re.MULTILINE)
    assert {place.rpartition(".")[2] for place in shown} >= {*hmp.__all__, *(name for name in vars(hmp.types) if name[0].isupper())}
    tables = re.sub(r"<!--.*?-->", "", text)
    assert [name for name in hmp.__all__ if not re.search(rf"`(?:\w+\.)*{name}\b", tables)] == []


def test_the_table_of_presets_is_what_they_hold() -> None:
    page = presets.inserted()
    assert "`torch-cpu@2.9` has the lists of `torch-cpu@2.7`" in page
    for op, name, held in [("mul", "habana", "bf16"), ("mul", "torch-cpu", ""), ("softmax", "habana", "fp32"), ("linear", "bert", "bf16")]:
        (row,) = re.findall(rf"^\| `{op}` \|(.*)\|$", page, re.MULTILINE)
        assert row.split("|")[presets.COLUMNS.index(name)].strip() == held


def test_every_environment_variable_is_on_its_page() -> None:
    page = (doc_blocks.PAGES / "reference" / "cli.md").read_text(encoding="utf-8")
    read = set()
    for file in (doc_blocks.ROOT / "hmp").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if "environ" in source:
            read |= set(re.findall(r'"((?:HMP|PT_HPU|OMPI)_[A-Z_0-9]+|RANK|WORLD_SIZE|LOCAL_RANK|\w+_LIST)"', source))
    assert len(read) >= 10
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []
