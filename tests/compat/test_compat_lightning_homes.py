"""Which of Lightning's two packages is taken, by what is installed; what waits for an import is done at it, once, and not before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from command_kit import error_without, install
from hmp.compat.lightning_packages import PACKAGES as HOMES
from hmp.compat.lightning_packages import installed, preferred
from process_kit import to_install

if importlib.util.find_spec("lightning") is None:
    pytest.skip("Lightning is not installed", allow_module_level=True)
PACKAGES = ("lightning", "pytorch_lightning")


def test_without_either_the_error_names_the_command_that_installs_it():
    said = "hmp.compat.lightning expected lightning or pytorch_lightning, got neither"
    assert error_without("hmp.compat.lightning", *PACKAGES) == f"{said}; {to_install('lightning')}"
    with pytest.MonkeyPatch.context() as patch:
        for package in PACKAGES:
            patch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match="a test expected lightning or pytorch_lightning, got neither"):
            installed("a test")


def test_a_release_that_is_too_old_is_told_with_the_one_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    install(tmp_path, monkeypatch, "pytorch_lightning", "1.5.10")
    with pytest.raises(ImportError) as error:
        installed("hmp.compat.lightning")
    assert str(error.value) == (
        "hmp.compat.lightning expected lightning or pytorch_lightning 1.8 or later, got pytorch_lightning 1.5.10; "
        + to_install("lightning")
    )


def test_the_one_that_the_program_imported_is_preferred(monkeypatch: pytest.MonkeyPatch):
    for home in HOMES:
        monkeypatch.delitem(sys.modules, home, raising=False)
    assert preferred(installed("a test")) == "lightning.pytorch"
    monkeypatch.setitem(sys.modules, "pytorch_lightning", sys)
    assert preferred(installed("a test")) == "pytorch_lightning"
