"""A package of an extra that is too old, or does not import, is not told to be missing: by whatever needs it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import hmp
from command_kit import install
from hmp.cli import main
from process_kit import ROOT, to_install

COMMANDS = [
    *(("demo", package, "hmp demo needs", "demo") for package in ("sklearn", "numpy")),
    *((f"{name} r.py --html p.html", package, f"hmp {name}: --html needs", "report")
      for name, package in (("compare", "jinja2"), ("compare", "matplotlib"), ("tune", "jinja2"))),
    ("run --report r.html r.py", "jinja2", "hmp run: --report needs", "report"),
    *(("cast-weights a --model r:model -o b", package, "hmp cast-weights: needs", "weights") for package in ("safetensors",)),
    *(("run --capture a r.py", package, "hmp run: --capture needs", "capture") for package in ("safetensors", "numpy")),
]  # fmt: skip
TOO_OLD = {"sklearn": "1.2.2", "jinja2": "3.0.3"}


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
    for name in [name for name in sys.modules if name.startswith("hmp.") and ".page" in name]:
        monkeypatch.delitem(sys.modules, name)  # which would have asked already
    if not is_there:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
        said = f"{who} {package}, not installed here: {to_install(extra)}\n"
    else:
        distribution = "scikit-learn" if package == "sklearn" else package
        install(tmp_path, monkeypatch, distribution, TOO_OLD[package])
        oldest, *_ = re.findall(rf'"{distribution}>=(.*?)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        said = f"{who} {package} {oldest} or later, and {TOO_OLD[package]} is installed: {to_install(extra)}\n"
    assert main(command.split()) == 2
    assert capsys.readouterr().err == said
