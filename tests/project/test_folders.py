"""Tests stand in the folder of the package that they test, and the tests of one folder run without the others."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
OF_NO_PACKAGE = {"device", "models", "project", "releases", "rules", "support", "sweep", "training"}
FILES = sorted(file for file in TESTS.rglob("*.py") if file.parent != TESTS)
FOLDERS = sorted({file.relative_to(TESTS).parts[0] for file in FILES})
SHARED = {path.stem for path in (TESTS / "support").iterdir()}


def test_a_folder_is_a_package_or_one_of_those_that_belong_to_none() -> None:
    packages = {init.parent.name for init in (ROOT / "hmp").glob("*/__init__.py")}
    assert packages.isdisjoint(OF_NO_PACKAGE)
    assert set(FOLDERS) - packages == OF_NO_PACKAGE
    assert [file.name for file in TESTS.glob("*.py")] == ["conftest.py"]


def test_every_test_of_a_rule_by_file_stands_with_the_rules() -> None:
    by_number = [file for file in FILES if file.name.startswith("test_r") and file.name[6].isdigit()]
    assert {file.parent.name for file in by_number} == {"rules"}
    assert {file.name.split("_")[1] for file in by_number} >= {f"r{number}" for number in range(1, 20)}


def test_no_two_modules_have_one_name() -> None:
    """pytest puts each folder on sys.path: of two helpers with one name, the wrong one might be imported."""
    modules = Counter(path.stem for path in TESTS.glob("*/*") if path.suffix == ".py" or (path / "__init__.py").exists())
    assert [name for name, count in modules.items() if count > 1] == []


def test_what_is_imported_from_another_folder_stands_in_support() -> None:
    everywhere = {path.stem for path in TESTS.glob("*/*") if path.suffix != ".txt"}
    for file in FILES:
        folder = TESTS / file.relative_to(TESTS).parts[0]
        elsewhere = everywhere - {path.stem for path in folder.iterdir()} - SHARED
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert elsewhere.isdisjoint(name.partition(".")[0] for name in names), f"{file}:{getattr(node, 'lineno', 0)}"
