"""The house of hmp: packages import from those below them only, and through what they export; no circle of files, not for a type and
not inside a function; torch's private names in one place; files of bearable size."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())

# From the ground up: what stands in one line imports nothing of that line but itself.
LEVELS = (
    "errors torch_releases version",
    "extras fork_safe outermost torch_dispatcher torch_private weak_tensors",
    "formatting low_kernels observing uncompiled",
    "patching",
    "context casting",
    "caches ops",
    "fp8 saved",
    "lists",
    "wrapping",
    "torch_hooks",
    "dispatch",
    "torch_compile diagnostics",
    "session",
    "printers",
    "report benchmark",
    "numerics",
    "tune captures",
    "__init__",
    "compat",
    "cli",
    "__main__",
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names.split()}
# The core: others take from its packages what these export. Tools stand above it, and take no part in casting.
CORE = [name for name, level in LEVEL_OF.items() if level <= LEVEL_OF["session"]]

LONGEST_FILE = 800
# Where torch's private names may be read; bridges to libraries may read their own.
MAY_READ = "torch_private.py torch_dispatcher.py torch_compile/ compat/".split()
WAITED_FOR = {"torch._dynamo", "torch.export._trace"}  # whose import torch_compile/bridge.py waits for


class Import(NamedTuple):
    """`importer` takes `name` of the module `source`, all three dotted; `source.name` or `source` is the module that it leads to."""

    importer: str
    source: str
    name: str
    taken: str


def modules() -> dict[str, Path]:
    """Every module of hmp, by its dotted name; a package by its own."""
    files = sorted((ROOT / "hmp").rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


MODULES = modules()


def imports_of(module: str, path: Path, tree: ast.AST, *, for_types: bool) -> Iterator[Import]:
    """What a module imports of hmp, wherever in it; with or without what it imports for types alone."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    todo = [tree]
    while todo:
        node = todo.pop()
        # those of hmp itself are what it imports when they are asked for
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and module != "hmp" and not for_types:
            todo.extend(node.orelse)
            continue
        todo.extend(each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr))
        found = []
        if isinstance(node, ast.Import):
            found = [(each.name, "") for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            found = [(".".join([*base, *([node.module] if node.module else [])]), each.name) for each in node.names]
        for source, name in found:
            if source.split(".")[0] == "hmp":
                yield Import(module, source, name, f"{source}.{name}" if f"{source}.{name}" in MODULES else source)


@functools.cache
def tree_of(module: str) -> ast.AST:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def every_import() -> Iterator[Import]:
    for module, path in MODULES.items():
        yield from imports_of(module, path, tree_of(module), for_types=False)


def package_of(module: str) -> str:
    """The room of the first floor that a module is in: `caches` of `hmp.caches.weight_cache`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_a_package_imports_from_packages_below_it_and_takes_of_the_core_what_is_exported() -> None:
    assert {package_of(module) for module in MODULES} == set(LEVEL_OF)
    used = set()
    for each in every_import():
        importer, package = package_of(each.importer), package_of(each.taken)
        if importer != package:
            assert LEVEL_OF[package] < LEVEL_OF[importer], f"{each.importer} imports {each.taken}"
            if package in CORE and f"hmp.{package}" in MODULES and MODULES[f"hmp.{package}"].name == "__init__.py":
                assert each.source == f"hmp.{package}", f"{each.importer} takes {each.name} of {each.source}: import it from hmp.{package}"
                used.add((package, each.name))
    exported = {(package, name) for package in CORE for name in getattr(importlib.import_module(f"hmp.{package}"), "__all__", ())}
    assert exported == used, "the core exports what nobody uses, or does not export what is used"


def test_files_import_each_other_in_no_circle() -> None:
    below = {
        module: {each.taken for each in imports_of(module, path, tree_of(module), for_types=True)} - {module}
        for module, path in MODULES.items()
    }
    TopologicalSorter(below).prepare()  # CycleError names the circle


def test_private_names_of_torch_are_read_in_one_module() -> None:
    for path in MODULES.values():
        if not path.relative_to(ROOT / "hmp").as_posix().startswith(tuple(MAY_READ)):
            code = re.sub(r'#[^\n]*|""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            found = set(re.findall(r"\btorch(?:\.\w+)*\._(?!_)\w+|from torch[\w.]* import _\w+", code))
            assert found <= WAITED_FOR, f"{path}: {found}"


def test_no_file_is_longer_than_what_is_read_at_once() -> None:
    files = [*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    too_long = [path for path in files if path.read_text(encoding="utf-8").count("\n") > LONGEST_FILE]
    assert not too_long, f"no file is longer than {LONGEST_FILE} lines: move an idea to a place of its own"


def test_no_two_modules_of_tests_have_one_name() -> None:
    """pytest puts each folder on sys.path: of two helpers with one name, the wrong one might be imported."""
    names = Counter(path.stem for path in (ROOT / "tests").glob("*/*") if path.suffix == ".py" or (path / "__init__.py").exists())
    assert [name for name, count in names.items() if count > 1] == []
