"""The house of hmp: packages import from those below them only, and through what they export; no circle of files, not for a type and
not inside a function; rooms of bearable size."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import pytest

from hmp.printers import PRINTERS

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
    "cli pytest_plugin",
    "__main__",
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names.split()}
# The core: others take from its packages what these export. Tools stand above it, and take no part in casting.
CORE = [name for name, level in LEVEL_OF.items() if level <= LEVEL_OF["session"]]
MACHINERY = {"wrapping", "dispatch", "torch_hooks", "patching", "torch_compile"}

LONGEST_FILE = 800


class Import(NamedTuple):
    """`importer` takes `name` of the module `source`, all three dotted."""

    importer: str
    source: str
    name: str


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of hmp, by its dotted name; a package by its own."""
    found = {}
    for path in sorted((root / "hmp").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(module: str, path: Path, *, for_types: bool = False) -> Iterator[Import]:
    """What a module imports of hmp, wherever in it; with or without what it imports for types alone."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        # those of hmp itself are what it imports when they are asked for
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and module != "hmp" and not for_types:
            todo.extend(node.orelse)
            continue
        todo.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (Import(module, a.name, "") for a in node.names if a.name.split(".")[0] == "hmp")
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            if source.split(".")[0] == "hmp":
                yield from (Import(module, source, a.name) for a in node.names)


EVERY_IMPORT = [each for module, path in MODULES.items() for each in imports_of(module, path)]


def package_of(module: str) -> str:
    """The room of the first floor that a module is in: `caches` of `hmp.caches.weight_cache`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def taken(each: Import, there_are: Mapping[str, Path] = MODULES) -> str:
    """The module that an import leads to."""
    return f"{each.source}.{each.name}" if f"{each.source}.{each.name}" in there_are else each.source


def circle(among: Mapping[str, Path]) -> list[str]:
    """Modules each of which imports the next, the last of them the first; [] where there is no such circle."""
    below = {module: {taken(each, among) for each in imports_of(module, path, for_types=True)} - {module} for module, path in among.items()}
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # graphlib names what is imported first
    return []


def test_every_package_has_a_level_and_says_in_a_sentence_what_it_is_for() -> None:
    assert {package_of(module) for module in MODULES} == set(LEVEL_OF)
    for module, path in MODULES.items():
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            assert text and text.splitlines()[0].endswith((".", ":")), module


def test_a_package_imports_from_packages_below_it() -> None:
    upwards = {
        f"{each.importer} imports {taken(each)}"
        for each in EVERY_IMPORT
        if package_of(taken(each)) != package_of(each.importer) and LEVEL_OF[package_of(taken(each))] >= LEVEL_OF[package_of(each.importer)]
    }
    assert not upwards, "\n".join(sorted(upwards))


def test_files_import_each_other_in_no_circle() -> None:
    assert not circle(MODULES), " imports ".join(circle(MODULES))


@pytest.mark.parametrize(
    "back",
    [
        "from .table import table\n",
        "def text():\n    from .table import table\n",
        "def text():\n    import hmp.room.table\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import table\n",
        "try:\n    from ..room.table import table\nexcept ImportError:\n    pass\n",
    ],
)
def test_a_circle_of_files_is_found_wherever_the_import_stands(tmp_path: Path, back: str) -> None:
    room = tmp_path / "hmp" / "room"
    room.mkdir(parents=True)
    for name, text in {"../__init__": "", "__init__": "", "table": "from .data import Data\n", "data": "import json\n"}.items():
        (room / f"{name}.py").write_text(text, encoding="utf-8")
    assert not circle(modules(tmp_path))
    (room / "data.py").write_text(back, encoding="utf-8")
    assert set(circle(modules(tmp_path))) == {"hmp.room.data", "hmp.room.table"}


def test_a_printer_is_asked_for_in_the_method_that_it_works_for_and_nowhere_else() -> None:
    for method, place in PRINTERS.items():
        assert callable(resolve_name(place))
        asking = [(module, path) for module, path in MODULES.items() if f'printer("{method}")' in path.read_text(encoding="utf-8")]
        assert len(asking) == 1, f"{method} is asked for in {asking}"
        ((module, _),) = asking
        assert callable(resolve_name(f"{module}:{method}")), method


def test_what_a_package_gives_to_others_is_what_it_exports() -> None:
    exported = {package: set(_all_of(MODULES[f"hmp.{package}"])) for package in CORE if MODULES[f"hmp.{package}"].name == "__init__.py"}
    used: dict[str, set[str]] = {package: set() for package in exported}
    for each in EVERY_IMPORT:
        package = package_of(taken(each))
        if package in exported and package_of(each.importer) != package:
            assert each.source == f"hmp.{package}", f"{each.importer} takes {each.name} of {each.source}: import it from hmp.{package}"
            used[package].add(each.name)
    for package, names in exported.items():
        assert used[package] == names, f"hmp.{package} exports what nobody uses, or does not export: {used[package] ^ names}"


def _all_of(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def test_tools_stand_on_what_the_core_decides_and_not_on_how_it_is_done() -> None:
    tools = LEVEL_OF.keys() - {*CORE, "__init__"}
    reaching_in = [each for each in EVERY_IMPORT if package_of(each.importer) in tools and package_of(taken(each)) in MACHINERY]
    assert not reaching_in


def test_no_file_is_longer_than_what_is_read_at_once() -> None:
    others = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert others
    too_long = [path for path in (*MODULES.values(), *others) if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST_FILE]
    assert not too_long, f"no file is longer than {LONGEST_FILE} lines: move an idea to a place of its own"


def test_no_module_of_the_core_has_the_name_of_a_function_of_its_own() -> None:
    for module, path in MODULES.items():
        defined = ast.parse(path.read_text(encoding="utf-8")).body
        names = {node.name for node in defined if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        # which of the two a package gives would depend on who was imported first
        assert package_of(module) not in CORE or module.rpartition(".")[2] not in names, module
