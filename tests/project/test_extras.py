"""A package of an extra that is too old, or does not import, is not told to be missing: by whatever needs it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import hmp
from hmp.cli import main
from hmp.extras import EXTRAS
from process_kit import to_install

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())


def install(folder: Path, patch: pytest.MonkeyPatch, package: str, release: str) -> None:
    """Puts the name and number of a release where an installer would, before the one that there is."""
    info = folder / f"{package.replace('-', '_')}-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
    patch.syspath_prepend(folder)


def imported_anew(module: str, patch: pytest.MonkeyPatch) -> str:
    """The error of an import of this module."""
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        patch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as error:
        importlib.import_module(module)
    return str(error.value)


def test_the_table_says_what_pyproject_says() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra, wanted in EXTRAS.items():
        (listed,) = re.findall(rf"^{extra} = \[(.*?)\]", text, re.MULTILINE)
        ours = [f"{'scikit-learn' if name == 'sklearn' else name}{oldest and f'>={oldest}'}" for name, oldest in wanted.items()]
        assert sorted(re.findall(r'"(.*?)"', listed)) == sorted(ours)


MODULES = [
    ("hmp.report.page", "jinja2", "3.0.3", "a report's page needs", "report"),
    ("hmp.report.page.charts", "matplotlib", "3.7.5", "a report's page needs", "report"),
    ("hmp.compat.transformers", "transformers", "4.24.0.dev0", "hmp.compat.transformers needs", "transformers"),
]


@pytest.mark.parametrize("is_there", [False, True], ids=["not installed", "too old"])
@pytest.mark.parametrize(("module", "package", "release", "who", "extra"), MODULES)
def test_a_module_names_what_it_needs(
    module, package, release, who, extra, is_there, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_there:
        install(tmp_path, monkeypatch, package, release)
        said = f"{who} {package} {EXTRAS[extra][package]} or later, and {release} is installed: {to_install(extra)}"
    else:
        monkeypatch.setitem(sys.modules, package, None)
        said = f"{who} {package}, not installed here: {to_install(extra)}"
    assert imported_anew(module, monkeypatch) == said


COMMANDS = [
    *(("demo", package, "hmp demo needs", "demo") for package in ("sklearn", "rich", "numpy")),
    ("tune r.py", "scipy", "hmp tune: needs", "tune"),
    *((f"{name} r.py --html p.html", package, f"hmp {name}: --html needs", "report")
      for name, package in (("compare", "jinja2"), ("compare", "matplotlib"), ("tune", "jinja2"))),
    ("run --html p.html r.py", "jinja2", "hmp run: --html needs", "report"),
    ("run --report r.html r.py", "jinja2", "hmp run: --report r.html: a report's page needs", "report"),
    *(("cast-weights a --model r:model -o b", package, "hmp cast-weights: needs", "weights") for package in ("safetensors", "rich")),
    *(("run --capture a r.py", package, "hmp run: --capture: a capture needs", "capture") for package in ("safetensors", "numpy")),
]  # fmt: skip
TOO_OLD = {"sklearn": "1.2.2", "scipy": "1.10.1", "jinja2": "3.0.3"}


@pytest.mark.parametrize(
    ("command", "package", "who", "extra", "is_there"),
    [*((*each, False) for each in COMMANDS), *((*each, True) for each in COMMANDS if each[1] in TOO_OLD)],
)
def test_a_command_asks_for_its_extra_before_the_work(
    command, package, who, extra, is_there, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text("def model(): ...\ndef batches(): ...\ndef loss(model, batch): ...\n")
    for name in ("compare", "tune"):
        monkeypatch.setattr(hmp, name, lambda *args, **options: pytest.fail("it began"))
    for name in [name for name in sys.modules if name.startswith("hmp.report.page")]:
        monkeypatch.delitem(sys.modules, name)
    if not is_there:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
        said = f"{who} {package}, not installed here: {to_install(extra)}\n"
    else:
        install(tmp_path, monkeypatch, "scikit-learn" if package == "sklearn" else package, TOO_OLD[package])
        said = f"{who} {package} {EXTRAS[extra][package]} or later, and {TOO_OLD[package]} is installed: {to_install(extra)}\n"
    assert main(command.split()) == 2
    assert capsys.readouterr().err == said
