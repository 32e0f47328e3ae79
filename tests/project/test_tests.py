"""What import-linter's contracts and ruff's rules in pyproject.toml cannot say of the house and of its tests."""

from __future__ import annotations

import ast
import pkgutil
import re
import types
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F

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


LONGEST_FILE = 800
# Where torch's private names may be read; bridges to libraries may read their own.
MAY_READ = "core/torch_private.py core/compile/ compat/".split()
# What only plug-ins do, and where the core names it for a reason of its own.
OF_PLUG_INS = r"fp8|float8|fp32_result|\bpack(?:ed|ing)\b|\bsaved list\b|\bsaved\.txt|saved_(?:recipe|file_path)"
MAY_NAME = {
    "convert.py": {"fp8", "fp32_result", "packed", "saved_file_path"},  # convert()'s docstring lists the keywords of hmp's own plug-ins
    "policy/policy.py": {"fp8", "fp32_result", "packed", "saved_recipe"},  # so does Policy's
    "rules/emulation.py": {"packed"},  # a PackedSequence of torch
    "rules/kernels.py": {"fp8", "packed"},  # fallbacks() has an example of its docstring's keys
    "rules/special.py": {"packed"},  # a PackedSequence of torch
    "torch_private.py": {"float8"},  # the dtype that a private function of torch takes
}
WAITED_FOR = {"torch._dynamo", "torch.export._trace"}  # whose import core/compile/dynamo_patches.py waits for
MODULES = sorted((ROOT / "hmp").rglob("*.py"))


def test_private_names_of_torch_are_read_in_one_module() -> None:
    for path in MODULES:
        if not path.relative_to(ROOT / "hmp").as_posix().startswith(tuple(MAY_READ)):
            code = re.sub(r'#[^\n]*|""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            found = set(re.findall(r"\btorch(?:\.\w+)*\._(?!_)\w+|from torch[\w.]* import _\w+", code))
            assert found <= WAITED_FOR, f"{path}: {found}"


def test_the_core_names_no_plug_in() -> None:
    core = ROOT / "hmp" / "core"
    texts = {path.relative_to(core).as_posix(): path.read_text(encoding="utf-8") for path in core.rglob("*.py")}
    found = {path: {word.lower() for word in re.findall(OF_PLUG_INS, text, re.IGNORECASE)} for path, text in texts.items()}
    assert {path: words for path, words in found.items() if words} == MAY_NAME, "say it of any list, or give a reason in MAY_NAME"


def test_no_file_is_longer_than_what_is_read_at_once() -> None:
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    too_long = [path for path in files if path.read_text(encoding="utf-8").count("\n") > LONGEST_FILE]
    assert not too_long, f"no file is longer than {LONGEST_FILE} lines: move an idea to a place of its own"


def test_no_two_classes_have_one_name() -> None:
    names = Counter(name for path in MODULES for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_modules_of_tests_have_one_name() -> None:
    """pytest puts each folder on sys.path: of two helpers with one name, the wrong one might be imported."""
    names = Counter(path.stem for path in (ROOT / "tests").glob("*/*") if path.suffix == ".py" or (path / "__init__.py").exists())
    assert [name for name, count in names.items() if count > 1 and name != "conftest"] == []


def _other(input, inplace=False):
    return input


CHANGES = [
    (torch, "mul", lambda *args: None),  # a builtin is bound anew
    (F.relu, "__code__", _other.__code__),
    (F.relu, "__defaults__", (True,)),
    (torch.Tensor, "__mul__", torch.Tensor.__mul__),  # what was inherited is shadowed
    (torch.nn.Linear, "__init__", types.MethodType(lambda self: None, None.__class__)),
    (torch.optim.SGD, "step", lambda self: None),
    (torch.backends.mha, "_is_fastpath_enabled", False),
]


def test_the_guard_sees_each_kind_of_change(monkeypatch, torch_differences):
    assert torch_differences() == []
    for owner, name, value in CHANGES:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert torch_differences() != [], name
    assert torch_differences() == []
