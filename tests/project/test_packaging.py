"""The op lists and the package are found from an installed wheel, as from this checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import doc_blocks
import hmp
import torch_alone

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("hmp", "op_lists", "pyproject.toml", "setup.cfg", "docs/package-index.md", "LICENSE")
REPORT = """
import json, pathlib, hmp, hmp.cli
print(json.dumps({
    "file": str(pathlib.Path(hmp.__file__).resolve()),
    "policies": {name: hmp.Policy.load(name).to_dict() for name in sorted(hmp.policies())},
}))
"""


def run(command: Sequence[str | Path], cwd: Path, **env: str) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped files, copied: a build leaves traces beside them."""
    target = tmp_path_factory.mktemp("checkout")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", "77", reason="the wheel is built without a network")
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, copy], folder)
    (built,) = folder.glob("hmp_torch-*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_every_module_and_every_list(wheel: Path) -> None:
    expected = {str(file.relative_to(ROOT)) for file in (ROOT / "hmp").rglob("*.py")} | {"hmp/py.typed", "hmp/cli/recipe.txt"}
    expected |= {"hmp/" + str(file.relative_to(ROOT)) for file in (ROOT / "op_lists").rglob("*.txt")}
    expected |= {str(file.relative_to(ROOT)) for file in (ROOT / "hmp/tools/pages/templates").iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "hmp = hmp.cli:main" in archive.read(entry_points).decode()
    assert held == expected, "see [tool.setuptools] in pyproject.toml: a new package is listed under packages"


@pytest.mark.native_kernels  # the README has the figures of a processor with instructions
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_in_a_fresh_environment_it_finds_its_lists_and_runs_the_first_example(
    kind: str, wheel: Path, copy: Path, tmp_path: Path
) -> None:
    """torch, and setuptools for the build, are those of this environment: where they are installed, no .pth file is read."""
    built = wheel
    if kind == "sdist":
        run([sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"], copy)
        (built,) = tmp_path.glob("hmp_torch-*.tar.gz")
    fresh, others = tmp_path / "fresh", sysconfig.get_path("purelib")
    run([sys.executable, "-m", "venv", fresh], tmp_path)
    python = fresh / "bin" / "python"
    command = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", built]
    run(command, tmp_path, PYTHONPATH=others)
    found = json.loads(run([python, "-c", REPORT], tmp_path, PYTHONPATH=others).splitlines()[-1])
    assert Path(found["file"]).is_relative_to(fresh.resolve()), "another hmp was imported"
    assert found["policies"] == {name: hmp.Policy.load(name).to_dict() for name in hmp.policies()}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "first.py").write_text(doc_blocks.blocks(readme, "python")[0], encoding="utf-8")
    run([python, torch_alone.__file__, ",".join(sorted(torch_alone.names())), "first.py"], tmp_path, PYTHONPATH=others)
    assert doc_blocks.words((tmp_path / "first.py.printed").read_text()) == doc_blocks.words(doc_blocks.blocks(readme, "text")[0])
