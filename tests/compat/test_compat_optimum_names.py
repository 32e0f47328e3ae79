"""`optimum.habana` is importable with the shim and gone after it; a real one wins where it imports; what there is not is told."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hmp.compat import habana

NAMES = """optimum.habana optimum.habana.transformers optimum.habana.transformers.gaudi_configuration optimum.habana.transformers.trainer
optimum.habana.transformers.trainer_seq2seq optimum.habana.transformers.training_args optimum.habana.transformers.training_args_seq2seq
optimum.habana.utils""".split()


def imported() -> list[str]:
    return sorted(name for name in sys.modules if name.split(".")[0] == "optimum")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    assert imported() == []
    yield
    for name in imported():
        del sys.modules[name]


def test_every_name_is_importable_and_gone_afterwards(hpu_on_cpu: habana.Shim) -> None:
    assert imported() == []
    for name in NAMES:
        assert importlib.import_module(name).__name__ == name
    assert imported() == sorted([*NAMES, "optimum"])
    hpu_on_cpu.uninstall()
    assert imported() == []
    assert importlib.util.find_spec("optimum") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("optimum.habana")


@pytest.mark.usefixtures("hpu_on_cpu")
def test_what_there_is_not_is_an_import_error_with_what_there_is() -> None:
    with pytest.raises(ImportError, match=r"habana has no 'GaudiDDIMScheduler'; .* GaudiTrainer, .* install optimum-habana"):
        exec("from optimum.habana import GaudiDDIMScheduler")
    with pytest.raises(ImportError, match=r"habana\.utils has no 'to_device_dtype'; .* get_hpu_memory_stats, set_seed\. Use"):
        exec("from optimum.habana.utils import to_device_dtype")
    with pytest.raises(ModuleNotFoundError, match=r"optimum\.habana has no 'diffusers'; .* utils\. Use"):
        importlib.import_module("optimum.habana.diffusers")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'optimum\.neuron'"):
        importlib.import_module("optimum.neuron")  # another's
    import optimum.habana

    # who only wants to know is told as by any module
    assert not hasattr(optimum.habana, "diffusers") and getattr(optimum.habana, "GaudiDDIMScheduler", None) is None
    assert importlib.util.find_spec("optimum.habana.diffusers") is None
    assert not hasattr(optimum.habana, "__wrapped__") and inspect.unwrap(optimum.habana) is optimum.habana


def test_one_that_does_not_import_gives_way_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "optimum" / "habana"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .part import GaudiTrainer\nfrom transformers import not_there\n")
    (package / "part.py").write_text("GaudiTrainer = 'real'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with habana.install("cpu"), caplog.at_level(logging.WARNING, "hmp"):
        from optimum.habana import GaudiTrainer
        from optimum.habana.utils import set_seed

        assert GaudiTrainer.__module__ == "hmp.compat.optimum_habana.trainer"
        assert set_seed.__module__ == "transformers.trainer_utils"
        with pytest.raises(ModuleNotFoundError, match=r"optimum\.habana has no 'part'"):
            importlib.import_module("optimum.habana.part")
    assert "does not import (ImportError: cannot import name 'not_there'" in caplog.text
    assert "so hmp replaces it" in caplog.text
    assert [name for name in imported() if name != "optimum"] == []
