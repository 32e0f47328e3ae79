"""Tests ask hmp's public names, so that the code may be rewritten under them; tests/unit holds the few that cannot."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import hmp

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
TESTS, UNIT = ROOT / "tests", ROOT / "tests" / "unit"
PUBLIC = {"hmp.__main__", "hmp.compat", "hmp.errors", "hmp.low_kernels", "hmp.memory", "hmp.types"}
# it has main(): ruff may bar what is inside of it alone
PARTLY = {"hmp.cli"}
BARRED = set(re.findall(r'^"(hmp\.[\w.]+)"\.msg = ', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))


def test_ruff_bars_all_of_hmp_but_its_public_names() -> None:
    folder = Path(hmp.__file__).parent
    inside = {f"hmp.{each.name}" for each in pkgutil.iter_modules([str(folder)])} - PUBLIC
    for package in PARTLY:
        parts = pkgutil.iter_modules([str(folder / package.partition(".")[2])])
        inside = inside - {package} | {f"{package}.{each.name}" for each in parts}
    assert inside == BARRED, "pyproject.toml, [tool.ruff.lint.flake8-tidy-imports.banned-api]"


def test_no_test_reaches_an_inside_by_its_name_in_a_string() -> None:
    """As monkeypatch.setattr("hmp.inside.name", ...) does, sys.modules["hmp.inside"], or code for another process."""
    barred = re.compile(rf"(?:^|(?:from|import) )({'|'.join(map(re.escape, sorted(BARRED)))})\b(?!\()")
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        if UNIT in path.parents or path in (TESTS / "conftest.py", Path(__file__)):
            continue
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in BARRED):
            continue  # to parse all tests takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in barred.findall(node.value)]
    assert found == []


def test_what_stands_in_unit_is_little_and_says_why() -> None:
    files = sorted(UNIT.glob("test_*.py"))
    assert len(files) <= 20
    silent = [path.name for path in files if "\n\nNo public call " not in (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")]
    assert silent == []


def test_the_tests_that_do_not_run_on_a_device_are_there() -> None:
    """A test that got another name would run there again."""
    names = re.findall(r'"(test_\w+)(?:\.py)?(?:\[[^"]*\])?"', (TESTS / "support" / "device_tensors.py").read_text(encoding="utf-8"))
    files = sorted((TESTS / "rules").glob("*.py")) + sorted((TESTS / "properties").glob("*.py"))
    there = {path.stem for path in files} | {
        name for path in files for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    assert [name for name in names if name not in there] == []
