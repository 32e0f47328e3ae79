"""Each test of a command runs in a folder of its own, and what a recipe adds to sys.path and sys.modules goes with the test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hmp


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("hmp_recipe", None)


@pytest.fixture
def captures(in_a_folder_of_its_own: None) -> None:
    """trainer.capture and server.capture in the current folder: the same layer, whose name and second row differ."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    for name, key, scale in (("trainer", "dense", 1.0), ("server", "fc", 2.0)):
        x[1] *= scale
        with hmp.capture(f"{name}.capture", model := torch.nn.ModuleDict({key: layer})):
            model[key](x)
