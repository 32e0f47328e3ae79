"""What import-linter's contracts in pyproject.toml cannot say of the house: torch's private names in one place, files of bearable size."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
LONGEST_FILE = 800
# Where torch's private names may be read; bridges to libraries may read their own.
MAY_READ = "core/torch_private.py core/compile/ compat/".split()
# What only plug-ins do, and where the core names it for a reason of its own.
OF_PLUG_INS = r"fp8|float8|fp32_result|\bpack(?:ed|ing)\b|\bsaved list\b|\bsaved\.txt|saved_(?:recipe|file_path)"
MAY_NAME = {
    ("convert.py", "fp8"): "convert()'s docstring lists the keywords of hmp's own plug-ins",
    ("convert.py", "fp32_result"): "the same",
    ("convert.py", "packed"): "the same",
    ("convert.py", "saved_file_path"): "the same",
    ("policy/policy.py", "fp8"): "so does Policy's",
    ("policy/policy.py", "fp32_result"): "the same",
    ("policy/policy.py", "packed"): "the same",
    ("policy/policy.py", "saved_recipe"): "the same",
    ("rules/emulation.py", "packed"): "a PackedSequence of torch",
    ("rules/kernels.py", "fp8"): "fallbacks() has an example of its docstring's keys",
    ("rules/kernels.py", "packed"): "the same",
    ("rules/special.py", "packed"): "a PackedSequence of torch",
    ("torch_private.py", "float8"): "the dtype that a private function of torch takes",
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
    found = {
        (path.relative_to(core).as_posix(), word.lower())
        for path in core.rglob("*.py")
        for word in re.findall(OF_PLUG_INS, path.read_text(encoding="utf-8"), re.IGNORECASE)
    }
    assert found == MAY_NAME.keys(), "say it of any list, or give a reason in MAY_NAME"


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
