"""The frozen lists of a torch release are what that release registers for autocast; names without a folder stand for them."""

from __future__ import annotations

import contextlib
import logging
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hmp

RELEASE = ".".join(torch.__version__.split(".")[:2])
FROZEN = [name.partition("@")[2] for name in hmp.policies() if name.startswith("torch-cpu@")]
kept_here = pytest.mark.skipif(RELEASE not in FROZEN, reason=f"no lists of torch {RELEASE} are kept")


@kept_here
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_the_lists_are_what_this_torch_answers_when_it_is_asked(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [".ci/autocast-lists", f"torch-{device}", str(tmp_path / "asked")])
    runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "autocast-lists"))
    asked, kept = hmp.Policy.load(tmp_path / "asked"), hmp.Policy.load(f"torch-{device}")
    assert capsys.readouterr().out == f"{asked}\n"
    assert asked.replace(name=kept.name) == kept == hmp.Policy.load(f"torch-{device}@{RELEASE}")


def test_releases_with_equal_lists_share_a_folder_and_each_folder_is_named_by_one_of_its_own() -> None:
    folders = {path.name for path in (Path(__file__).parents[2] / "op_lists").iterdir() if "@" in path.name}
    frozen = {name: hmp.Policy.load(name) for name in hmp.policies() if "@" in name}
    assert folders <= frozen.keys() and all(policy.name == name for name, policy in frozen.items())
    assert {policy.fingerprint for policy in frozen.values()} == {frozen[name].fingerprint for name in folders}
    assert len({frozen[name].fingerprint for name in folders}) == len(folders)


@pytest.mark.parametrize(
    ("available", "lists"),
    [((), "torch-cpu"), (("cuda",), "torch-cuda"), (("xpu",), "torch-cuda"), (("hpu",), "gaudi"), (("xla",), "torch-xla")],
    ids=str,
)
def test_autocast_is_the_list_of_the_device_in_use(monkeypatch: pytest.MonkeyPatch, available: tuple[str, ...], lists: str) -> None:
    for kind in ("cuda", "xpu", "hpu"):
        module: Any = type("device", (), {"is_available": staticmethod(lambda kind=kind: kind in available)})
        monkeypatch.setattr(torch, kind, module, raising=False)
    if "xla" in available:
        monkeypatch.setitem(sys.modules, "torch_xla", type("package", (), {"__version__": "2.9.0"}))
    assert hmp.Policy.load("autocast") == hmp.Policy.load(lists)


def _linear_on(device: str) -> torch.nn.Module:
    """A layer whose parameters are on a device that need not be there."""
    model = torch.nn.Linear(2, 2, bias=False, device="meta")
    with FakeTensorMode():
        model.weight = torch.nn.Parameter(torch.empty(2, 2, device=device))
    return model


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("natively", [True, False])
def test_autocast_is_the_list_of_the_device_that_the_model_is_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, natively: bool
) -> None:
    """On a machine with CUDA: a model on the CPU has the CPU's lists, and float16 is for cards without bfloat16 alone."""
    given = _linear_on(device)  # first: a torch made for CUDA would start CUDA
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or natively)
    low = torch.bfloat16 if natively or device == "cpu" else torch.float16
    lists = hmp.Policy.load(f"torch-{device}").replace(dtype=low)
    with caplog.at_level(logging.INFO, logger="hmp"):
        hmp.apply(given, verbose=True)
    said = next(each for each in caplog.messages if each.startswith("policy "))
    assert said == str(lists) and f"'torch-{device}@" in said and f"low-precision dtype {str(low).removeprefix('torch.')}" in said
    on_cuda = hmp.Policy.load("torch-cuda").replace(dtype=torch.bfloat16 if natively else torch.float16)
    assert hmp.Policy.load("autocast") == on_cuda  # without a model: the accelerator's
    assert hmp.Policy.load("torch-cuda").dtype is torch.float16  # as torch has it
    said = "cuda has no bfloat16 instructions, so 'autocast' is in float16: train with a GradScaler"
    assert caplog.messages.count(said) == (not natively)


@pytest.mark.parametrize(("index", "low"), [(0, "bfloat16"), (1, "float16")])
def test_of_several_cards_the_one_that_the_model_is_on_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, index: int, low: str
) -> None:
    """The second has no bfloat16, and the program is at the other one."""
    given, current = _linear_on(f"cuda:{index}"), [1 - index]

    @contextlib.contextmanager
    def at(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", at)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: current[-1] == 0)
    with caplog.at_level(logging.INFO, logger="hmp"):
        hmp.apply(given, verbose=True)
    assert f"low-precision dtype {low}" in caplog.text and current == [1 - index]
