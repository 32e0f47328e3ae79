"""The workflows are right by actionlint, and do nothing that .ci/ does not do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import doc_blocks

FOLDER = doc_blocks.ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))


def test_actionlint_finds_nothing() -> None:
    found = shutil.which("actionlint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip("actionlint comes with the extra test, for the platforms that it has a wheel for")
    run = subprocess.run([found, *map(str, FILES)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_step_calls_a_script_of_ci() -> None:
    called = set()
    for file in FILES:
        for command in re.findall(r"^ *(?:- )?run: (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE):
            script = command.partition(" ")[0]
            assert script.startswith(".ci/"), f"{file.name}: {command}"
            assert os.access(doc_blocks.ROOT / script, os.X_OK), script
            called.add(script)
    assert called == {f".ci/{name}" for name in ("run", "versions", "nightly", "site", "release")}


def test_a_release_by_another_tag_than_that_of_the_version_is_refused() -> None:
    run = subprocess.run([doc_blocks.ROOT / ".ci" / "release", "v0.0.0"], capture_output=True, text=True)
    assert run.returncode == 1
    assert re.search(r"the tag is v0\.0\.0, and pyproject\.toml says version (\S+): the tag of that is v\1", run.stderr)
