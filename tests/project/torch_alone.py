"""Run scripts in one process, maybe where nothing but torch and what torch depends on can be imported: what `pip install .` brings.

As a script it is that process: `torch_alone.py NAMES SCRIPT...`. An import finds the modules of NAMES, of the standard library, and no
other; of all where NAMES is "". The scripts run one after the other, each as the main module and with nothing converted, so that torch
and hmp are imported once.
"""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def run(scripts: Mapping[str, str], folder: Path, *, alone: bool = True) -> dict[str, str]:
    """Return what each script prints in `folder`, by its name. Fails with the traceback of those that raise."""
    from command_kit import python

    for name, code in scripts.items():
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    done = python(Path(__file__), ",".join(sorted(names())) if alone else "", *(f"{name}.py" for name in scripts), cwd=folder)
    assert done.returncode == 0, done.stderr
    return {name: (folder / f"{name}.py.printed").read_text(encoding="utf-8") for name in scripts}


def names() -> set[str]:
    """Return the first parts of what may be imported: hmp, torch, and what torch depends on, as the installed packages declare it."""
    from packaging.requirements import Requirement

    found, seen, wanted = {"hmp", "torch"}, set(), [Requirement("torch")]
    while wanted:
        each = wanted.pop()
        try:
            package = metadata.distribution(each.name)
        except metadata.PackageNotFoundError:
            continue  # nothing of it can be imported
        found |= {file.parts[0].partition(".")[0] for file in package.files or ()}
        # what setuptools brings of other packages, which torch.utils.benchmark imports it for
        found |= {
            file.parts[2].partition(".")[0] for file in package.files or () if file.parts[1:2] == ("_vendor",) and len(file.parts) > 2
        }
        for needs in map(Requirement, package.requires or ()):
            is_needed = needs.marker is None or any(needs.marker.evaluate({"extra": extra}) for extra in ("", *each.extras))
            if is_needed and str(needs) not in seen:
                seen.add(str(needs))
                wanted.append(needs)
    return found


class Only:
    """A finder that asks the finders that were there for the modules of `names` alone. Python says of the others that they are missing."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.finders: list[Any] = list(sys.meta_path)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.names and not name.startswith("_sysconfigdata"):  # of the standard library, and not listed
            return None
        return next(filter(None, (finder.find_spec(name, path, target) for finder in self.finders)), None)


def _fails(path: str) -> bool:
    import hmp

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    try:
        with open(f"{path}.printed", "w", encoding="utf-8") as sys.stdout:
            exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec", dont_inherit=True), main.__dict__)
    except BaseException:
        traceback.print_exc()
        return True
    finally:
        sys.stdout = sys.__stdout__
        hmp.revert()
        if "hmp.compat.habana" in sys.modules:
            sys.modules["hmp.compat.habana"].uninstall()
        if "accelerate.state" in sys.modules:  # which holds one precision for a process
            sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    return False


def _main(names: str, *scripts: str) -> int:
    if names:
        sys.meta_path[:] = [Only({*names.split(","), *sys.stdlib_module_names})]
    return sum(map(_fails, scripts))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
