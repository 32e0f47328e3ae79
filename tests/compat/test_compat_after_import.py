"""What is to be done to a module is done when a program imports it, once, and not before."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from hmp.compat.import_finders import after_import


@pytest.fixture(autouse=True)
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "late_one.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield
    sys.modules.pop("late_one", None)
    assert sys.meta_path == before


def test_it_waits_for_the_import_and_sees_the_whole_module():
    seen: list[types.ModuleType] = []

    def note(module: types.ModuleType) -> None:
        seen.append(module)
        vars(module)["value"] = 2

    after_import("late_one", note)
    assert not seen and "late_one" not in sys.modules
    module = importlib.import_module("late_one")
    assert seen == [module] and module.value == 2
    importlib.reload(module)
    assert seen == [module] and module.value == 1


def test_a_module_that_is_imported_is_seen_at_once():
    module = importlib.import_module("late_one")
    seen: list[types.ModuleType] = []
    after_import("late_one", seen.append)()
    assert seen == [module]


def test_it_can_be_called_off_twice():
    seen: list[types.ModuleType] = []
    call_off = after_import("late_one", seen.append)
    call_off()
    call_off()
    importlib.import_module("late_one")
    assert not seen


def test_two_may_wait_for_one_module_and_an_import_that_fails_calls_nobody(tmp_path: Path):
    (tmp_path / "late_one.py").write_text("raise ValueError('not yet')\n")
    seen: list[str] = []
    calls = [after_import("late_one", lambda module, name=name: seen.append(name)) for name in ("first", "second")]  # type: ignore[misc]
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module("late_one")
    assert not seen
    (tmp_path / "late_one.py").write_text("value = 10\n")
    importlib.invalidate_caches()
    importlib.import_module("late_one")
    for call_off in calls:
        call_off()
    assert sorted(seen) == ["first", "second"]
