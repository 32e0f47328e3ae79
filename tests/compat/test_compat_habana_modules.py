"""The names that programs import from Habana's package: there with the shim, gone after it, and Habana's own where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hmp.compat import habana
from hmp.compat.habana.names import TREE
from making import habana_names


def imported() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in ("habana_frameworks", "habana_dataloader") or name == "torch.hpu"]


def test_every_module_is_importable_and_gone_afterwards(hpu_on_cpu: habana.Shim) -> None:
    for name in TREE:
        module = importlib.import_module(name)
        assert module.__name__ == name
        assert importlib.util.find_spec(name) is module.__spec__
    assert set(imported()) == {*TREE, "torch.hpu"}
    hpu_on_cpu.uninstall()
    assert imported() == []
    assert importlib.util.find_spec("habana_frameworks") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("habana_frameworks.torch.core")


@pytest.mark.usefixtures("hpu_on_cpu")
def test_each_name_on_the_page_is_what_the_page_says(caplog: pytest.LogCaptureFixture) -> None:
    """Seen through the import system, as a program sees it: a name that cannot be what it is said to be fails here, and so does one
    that a module has and the page has not."""
    shown: dict[str, set[str]] = {}
    rows = re.findall(r"^\| `([\w.*]+)` \| ([\w ]+) \| (.*) \|$", habana_names.inserted(), re.MULTILINE)
    for name, state, words in rows:
        module, _, last = name.rpartition(".")
        shown.setdefault(module, set()).add(last)
        if name in TREE:
            continue
        if state == "error":
            with pytest.raises(ImportError) as caught:
                exec(f"from {module} import {last}; {last}()")
            assert words in str(caught.value)
            assert not hasattr(importlib.import_module(module), last)
            assert importlib.util.find_spec(name) is None
        elif state == "does nothing":
            call = getattr(importlib.import_module(module), last.replace("*", "anything"))
            said = len(caplog.records)
            with caplog.at_level(logging.WARNING, "hmp"):
                (call() if last == "ModuleCacher" else call)(torch.nn.Linear(1, 1))
            habana.no_ops.forget_warnings()
            assert words in caplog.records[said].getMessage()
        elif last not in ("*", "ImageFolderWithManifest"):
            exec(f"from {module} import {last}")
    assert len(rows) > 150
    for module in TREE:
        there = {name for name in vars(sys.modules.get(module, sys)) if not name.startswith("_") and f"{module}.{name}" not in TREE}
        assert module not in sys.modules or "*" in shown.get(module, set()) or there <= shown.get(module, set()), module


@pytest.mark.usefixtures("hpu_on_cpu")
@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import habana_frameworks.torch.nosuch", "habana_frameworks.torch has no 'nosuch'; it has _hpex_C, activity_profiler, core, "),
        (
            "from habana_frameworks.torch.hpex.normalization import FusedNorm",
            "has no 'FusedNorm'; it has FusedClipNorm, FusedRMSNorm. Please report",
        ),
        (
            "import habana_frameworks.torch.hpex.experimental.transformer_engine.recipe",
            "transformer_engine needs a Gaudi, which this machine lacks; name the ops in hmp's fp8.txt",
        ),
        ("from habana_frameworks.mediapipe.mediapipe import MediaPipe", "mediapipe needs a Gaudi, which this machine lacks; it decodes on"),
    ],
)
def test_what_there_is_not_is_an_import_error_that_says_what_there_is(statement: str, said: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement)
    assert said in str(caught.value)


def test_the_backend_hccl_is_registered_by_its_import_and_goes_with_the_shim() -> None:
    backend = torch.distributed.Backend
    tables = ("backend_list", "backend_capability", "backend_type_map", "default_device_backend_map", "_plugins")
    before = {name: getattr(backend, name) for name in tables}
    contents = {name: value.copy() for name, value in before.items()}
    start = torch.distributed.init_process_group
    for name in ("habana_frameworks.torch.distributed.hccl", "habana_frameworks.torch.core.hccl"):
        with habana.install("cpu"):
            with pytest.raises((ValueError, AttributeError)):
                _ = backend.HCCL
            assert importlib.import_module(name).initialize_distributed_hpu
            assert backend("hccl") == backend.HCCL == "hccl"
            assert "hccl" in backend.backend_list
            assert backend.backend_capability["hccl"] == ["cpu"]
            assert torch.distributed.init_process_group is not start
        assert torch.distributed.init_process_group is torch.distributed.distributed_c10d.init_process_group is start
        assert not hasattr(backend, "HCCL")
        assert all(getattr(backend, name) is before[name] for name in tables)
        assert {name: value.copy() for name, value in before.items()} == contents


@pytest.mark.usefixtures("hpu_on_cpu")
def test_initialize_distributed_hpu_tells_what_it_was_given_or_what_the_launcher_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from habana_frameworks.torch.distributed.hccl import initialize_distributed_hpu

    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    for name in names:
        monkeypatch.setenv(name, "9")  # so that it is undone, whoever sets it
        monkeypatch.delenv(name)
    assert initialize_distributed_hpu() == (1, 0, -1)  # what scripts take for "no launcher"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert initialize_distributed_hpu() == (2, 1, -1)
    assert initialize_distributed_hpu(world_size=4, rank=3, local_rank=1) == (4, 3, 1) == initialize_distributed_hpu()
    assert [os.environ[name] for name in names] == ["4", "3", "1"]


REAL = {"__init__.py": "", "torch/__init__.py": "", "torch/core.py": "def mark_step():\n    return 'real'\n", "torch/hpex/__init__.py": ""}


@pytest.fixture
def real_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of Habana's name, as of release 1.12 or later."""
    for name, text in REAL.items():
        file = tmp_path / "habana_frameworks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "habana_frameworks"
    habana.uninstall()
    for name in imported():
        del sys.modules[name]


@pytest.mark.usefixtures("real_package")
def test_where_habanas_package_is_it_is_used_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    to = torch.Tensor.to
    with caplog.at_level(logging.WARNING, "hmp"):
        shim, again = habana.install("cpu"), habana.install()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "habana_frameworks is installed here" in said and "have no effect" in said
    assert (shim.aside, shim.device, again.aside) == (True, None, True)
    assert importlib.import_module("habana_frameworks.torch.core").mark_step() == "real"
    assert importlib.util.find_spec("habana_frameworks.torch.hpu") is None
    assert torch.Tensor.to is to
    assert not hasattr(torch, "hpu")
