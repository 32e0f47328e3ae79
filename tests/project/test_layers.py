"""What import-linter's contracts in pyproject.toml cannot say of the house: torch's private names in one place, files of bearable size."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
LONGEST_FILE = 800
# Where torch's private names may be read; bridges to libraries may read their own.
MAY_READ = "core/torch_private.py core/torch_dispatcher.py core/compile/ compat/".split()
WAITED_FOR = {"torch._dynamo", "torch.export._trace"}  # whose import core/compile/bridge.py waits for
MODULES = sorted((ROOT / "hmp").rglob("*.py"))


def test_private_names_of_torch_are_read_in_one_module() -> None:
    for path in MODULES:
        if not path.relative_to(ROOT / "hmp").as_posix().startswith(tuple(MAY_READ)):
            code = re.sub(r'#[^\n]*|""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            found = set(re.findall(r"\btorch(?:\.\w+)*\._(?!_)\w+|from torch[\w.]* import _\w+", code))
            assert found <= WAITED_FOR, f"{path}: {found}"


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
