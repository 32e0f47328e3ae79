"""`hmp cast-weights`: a file of weights, each in the dtype in which its ops use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hmp.cli import main

safetensors: Any = pytest.importorskip("safetensors.torch")

MODEL = """
import torch

def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return model, torch.ones(2, 8)

def alone():
    return make()[0]

def wrong():
    return "model"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "weights_cli_model.py").write_text(MODEL)
    names: dict[str, Any] = {}
    exec(MODEL, names)
    safetensors.save_model(names["make"]()[0], "wide.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("function", "keep", "count"),
    [("make", [], 3), ("alone", [], 3), ("alone", ["--keep", "*.bias", "--keep", "1"], 1)],  # with a batch, and without one
)
def test_the_file_has_what_is_computed_low_in_the_low_dtype(
    folder: Path, function: str, keep: list[str], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", f"weights_cli_model:{function}", "-o", "low.safetensors", "--json", "done.json", *keep]
    assert main(["cast-weights", "wide.safetensors", *options]) == 0
    wide, low = safetensors.load_file("wide.safetensors"), safetensors.load_file("low.safetensors")
    assert low.keys() == wide.keys()
    for name, tensor in wide.items():
        is_kept = name.startswith("1.") or (bool(keep) and name.endswith("bias"))
        dtype = torch.float32 if is_kept else torch.bfloat16
        assert low[name].dtype is dtype and torch.equal(low[name], tensor.to(dtype)), name
    assert f"{count} of 5 weights cast" in capsys.readouterr().out
    assert json.loads(Path("done.json").read_text())["bytes_after"] == 2 * 64 + (4 if keep else 2) * 16 + 4 * 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.safetensors"], "expected a safetensors file"),
        (["wide.safetensors", "-o", "wide.safetensors"], "expected another file than the one that is read"),
        (["wide.safetensors", "--model", "weights_cli_model"], "expected MODULE:FUNCTION"),
        (["wide.safetensors", "--model", "nowhere_at_all:make"], "no module 'nowhere_at_all'"),
        (["wide.safetensors", "--model", "weights_cli_model:other"], "no function 'other'"),
        (["wide.safetensors", "--model", "weights_cli_model:wrong"], "expected wrong() to return a model, or (model, batch), got str"),
        (["other.safetensors"], "expected the weights of this model"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    safetensors.save_file({"a": torch.ones(1)}, "other.safetensors")
    before = Path("wide.safetensors").read_bytes()
    options = ["--model", "weights_cli_model:make", "-o", "low.safetensors"]
    assert main(["cast-weights", *options, *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("hmp cast-weights: ") and message in told and told.count("\n") == 1
    assert not Path("low.safetensors").exists() and Path("wide.safetensors").read_bytes() == before
