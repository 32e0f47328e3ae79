"""The house of hmp: packages import from those below them only, and through what they export; no circles; rooms of bearable size."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())

# From the ground up: what stands in one line imports nothing of that line but itself.
LEVELS = (
    "errors version",
    "fork_safe torch_private",
    "formatting observing",
    "patching",
    "context casting",
    "caches ops",
    "fp8",
    "lists",
    "wrapping",
    "torch_hooks",
    "dispatch",
    "torch_compile diagnostics",
    "session",
    "report benchmark",
    "numerics",
    "tune",
    "__init__",
    "compat",
    "cli pytest_plugin",
    "__main__",
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names.split()}
# The core: others take from its packages what these export. Tools stand above it, and take no part in casting.
CORE = [name for name, level in LEVEL_OF.items() if level <= LEVEL_OF["session"]]
MACHINERY = {"wrapping", "dispatch", "torch_hooks", "patching", "torch_compile"}

LONGEST_FILE, LONGEST_FUNCTION = 400, 60
# These may only shrink, and go when they are within the limit.
LONGER_FILES: dict[str, int] = {}
LONGER_FUNCTIONS: dict[str, int] = {}


class Import(NamedTuple):
    """`importer` takes `name` of the module `source`, all three dotted."""

    importer: str
    source: str
    name: str


def modules() -> dict[str, Path]:
    """Every module of hmp, by its dotted name; a package by its own."""
    found = {}
    for path in sorted((ROOT / "hmp").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(module: str) -> Iterator[Import]:
    """What a module imports of hmp, wherever in it, but for types alone."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        # those of hmp itself are what it imports when they are asked for
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and module != "hmp":
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


EVERY_IMPORT = [each for module in MODULES for each in imports_of(module)]


def package_of(module: str) -> str:
    """The room of the first floor that a module is in: `caches` of `hmp.caches.weight_cache`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def taken(each: Import) -> str:
    """The module that an import leads to."""
    return f"{each.source}.{each.name}" if f"{each.source}.{each.name}" in MODULES else each.source


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


def test_modules_of_a_package_import_each_other_in_no_circle() -> None:
    below = {module: {taken(each) for each in EVERY_IMPORT if each.importer == module} - {module} for module in MODULES}
    # a package's own names are those of its modules
    below = {module: found - {module.rpartition(".")[0]} for module, found in below.items()}
    remaining = dict(below)
    while remaining:
        free = [module for module, found in remaining.items() if not found & (remaining.keys() - {module})]
        assert free, f"these import each other: {sorted(remaining)}"
        for module in free:
            del remaining[module]


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


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file and its lines, without those of its docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
            said = (first.end_lineno or first.lineno) - first.lineno + 1 if is_text else 0
            yield f"{path.relative_to(ROOT).as_posix()}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1 - said


def test_no_file_and_no_function_is_longer_than_one_thought() -> None:
    files = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES.values()}
    functions = {name: length for path in MODULES.values() for name, length in _functions(path)}
    assert {name: length for name, length in files.items() if length > LONGEST_FILE} == LONGER_FILES
    others = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert others
    assert not [path for path in others if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST_FILE]
    assert {name: length for name, length in functions.items() if length > LONGEST_FUNCTION} == LONGER_FUNCTIONS


def test_no_module_of_the_core_has_the_name_of_a_function_of_its_own() -> None:
    for module, path in MODULES.items():
        defined = ast.parse(path.read_text(encoding="utf-8")).body
        names = {node.name for node in defined if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        # which of the two a package gives would depend on who was imported first
        assert package_of(module) not in CORE or module.rpartition(".")[2] not in names, module


def test_the_core_does_without_the_tools() -> None:
    tools = {"report", "tune", "benchmark", "numerics", "compat", "cli"}
    assert not [each for each in EVERY_IMPORT if package_of(each.importer) in CORE and package_of(taken(each)) in tools]
