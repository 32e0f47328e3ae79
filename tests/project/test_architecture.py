"""docs/pages/explain/architecture.md speaks of what there is; tests stand in the folder of the package that they test."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmp
from hmp.dispatch import dispatcher_code, fast_path
from hmp.ops import sites
from hmp.ops.signatures import signature_of

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
PAGE = (ROOT / "docs" / "pages" / "explain" / "architecture.md").read_text(encoding="utf-8")
PLACES = sorted(set(re.findall(r"`([\w/]+\.py)(?::(\w+))?`", PAGE)))


def test_every_place_that_it_names_is_there() -> None:
    for file, name in PLACES:
        path = ROOT / file if (ROOT / file).is_file() else ROOT / "hmp" / file
        assert path.is_file(), file
        if name:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
            assigned = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
            assert name in defined | assigned, f"{file}: {name}"


NAMED_FOLDERS = sorted(set(re.findall(r"`((?:tests|op_lists|caches|cli|compat|wrapping)/[\w/]*)[`/]", PAGE)))


def test_every_folder_that_it_names_is_there() -> None:
    for folder in NAMED_FOLDERS:
        place = folder.rpartition("/")[0] if "test_r" in folder else folder.rstrip("/")
        assert (ROOT / place).is_dir() or (ROOT / "hmp" / place).is_dir(), folder


def test_every_package_is_in_the_picture() -> None:
    picture = PAGE[PAGE.index("```text") : PAGE.index("```", PAGE.index("```text") + 3)]
    packages = {path.parent.name for path in (ROOT / "hmp").glob("*/__init__.py")} | {"errors", "fork_safe", "torch_private"}
    assert not {package for package in packages if not re.search(rf"\b{package}\b", picture)}


def test_the_code_of_a_dispatcher_is_what_is_written_for_linear() -> None:
    shown = PAGE[PAGE.index("def hmp_dispatcher(") : PAGE.rindex("\n```\n")]
    signature = signature_of(sites.sites_of("linear")[0])
    written = "\n".join(dispatcher_code.source(signature, fast_path.FastPath("dtype", torch.bfloat16, "CAST_PRODUCT_INPUT")))
    number = re.compile(r"SIGNATURES\[\d+\]")  # in the order in which ops are called
    assert number.sub("SIGNATURES[0]", written) == shown


@pytest.mark.native_kernels
def test_the_code_of_a_dispatcher_is_found_by_inspect_and_in_tracebacks() -> None:
    hmp.convert(policy="torch-cpu")
    F.linear(torch.randn(2, 3), torch.randn(4, 3))
    assert "def hmp_dispatcher(input" in inspect.getsource(F.linear.__code__)
    with pytest.raises(RuntimeError) as raised:
        F.linear(torch.randn(2, 3), torch.randn(4, 5))
    lines = [str(entry.statement).strip() for entry in raised.traceback]
    assert "return _op(input_cast, weight_cast, bias_cast)" in lines


TESTS = ROOT / "tests"
OF_NO_PACKAGE = {"properties", "device", "models", "project", "releases", "rules", "support", "sweep", "training"}
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
    everywhere = {path.stem for path in TESTS.glob("*/*") if path.suffix in ("", ".py")}
    for file in FILES:
        folder = TESTS / file.relative_to(TESTS).parts[0]
        elsewhere = everywhere - {path.stem for path in folder.iterdir()} - SHARED
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert elsewhere.isdisjoint(name.partition(".")[0] for name in names), f"{file}:{getattr(node, 'lineno', 0)}"
