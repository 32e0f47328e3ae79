"""The demo passes its own check, and fails it where hmp is off: one epoch is enough for that."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import hmp
from hmp.cli import main

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the extra demo is not installed")


@pytest.mark.slow
def test_check_fails_when_hmp_is_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hmp.disable_casts():
        assert main(["demo", "--epochs", "1", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    failed = printed.partition("check failed:")[2]
    assert "conv2d" in failed and "matmul" in failed and "disable_casts" in failed
    assert "check passed" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "float32"])
def test_demo_passes_its_own_check(
    kernels: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HMP_LOW_KERNELS", kernels)
    status = main(["demo", "--folder", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "check passed" in printed
