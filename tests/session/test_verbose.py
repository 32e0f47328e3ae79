"""isVerbose: the policy in force, then every distinct decision once, through the logger `hmp`."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmp

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `unreachable()` lists is said by test_names_taken.py; here, among all that the other tests hold, it takes seconds a call."""
    monkeypatch.setattr(sys.modules["hmp.session.conversion"], "tell_unreachable", lambda: None)


def decisions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hmp" and " at " in r.getMessage()]


def test_verbose_names_the_policy_that_comes_into_force(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hmp"):
        hmp.convert(isVerbose=True)
    text = caplog.text
    assert "policy 'habana'" in text
    assert "conv_transpose3d" in text
    assert "binary_cross_entropy_with_logits" in text


def test_verbose_says_op_place_inputs_and_casts(caplog: pytest.LogCaptureFixture) -> None:
    a = torch.randn(2, 2)
    with caplog.at_level(logging.INFO, logger="hmp"):
        hmp.convert(isVerbose=True)
        a @ a.to(torch.bfloat16)
        line = sys._getframe().f_lineno - 1
    (said,) = decisions(caplog)
    assert said.startswith("matmul (bf16)")
    assert f"{__file__}:{line}" in said
    assert "inputs float32, bfloat16" in said
    assert "float32 -> bfloat16" in said


def test_a_module_that_a_policy_is_applied_to_tells_of_its_own_calls(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.INFO, logger="hmp"):
        assert hmp.apply(model, "bert", verbose=True) is model
        assert "policy 'bert'" in caplog.text
        for _ in range(2):
            model(torch.ones(1, 2))
        (said,) = decisions(caplog)
        hmp.apply(model, "bert")
        model(torch.ones(1, 2).bfloat16())
    assert said.startswith("linear (bf16)")
    assert said.endswith("float32 -> bfloat16")
    assert decisions(caplog) == [said]


def test_verbose_says_a_decision_once_and_another_anew(caplog: pytest.LogCaptureFixture) -> None:
    a = torch.randn(2, 2)
    with caplog.at_level(logging.INFO, logger="hmp"):
        hmp.convert(isVerbose=True)
        for operand in (a, a, a.to(torch.bfloat16)):
            F.softmax(operand, dim=-1)
    said = decisions(caplog)
    assert len(said) == 2  # float32 twice is one decision, bfloat16 another
    assert "nothing to cast" in said[0]
    assert "bfloat16 -> float32" in said[1]


def test_verbose_speaks_as_long_as_it_is_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    a = torch.randn(2, 2)
    with caplog.at_level(logging.INFO, logger="hmp"):
        with hmp.convert(isVerbose=True):
            with hmp.disable_casts():
                a @ a
            assert decisions(caplog) == []
        a @ a
        hmp.convert()
        a @ a
    assert decisions(caplog) == []


SCRIPT = """
import torch, hmp
hmp.convert(isVerbose=True)
torch.ones(2, 2) @ torch.ones(2, 2)
"""


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("environment", "speaks"),
    [({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False), ({"RANK": "1", "HMP_LOG_ALL_RANKS": "1"}, True)],
)
def test_verbose_goes_to_stderr_of_rank_0_alone(environment: dict[str, str], speaks: bool) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env={"PATH": "", **environment}, capture_output=True, text=True, check=True
    )
    assert ("matmul (bf16)" in run.stderr) is speaks
    assert ("policy 'habana'" in run.stderr) is speaks
    assert run.stdout == ""


@pytest.mark.slow
def test_verbose_adds_no_handler_where_one_is_configured() -> None:
    script = "import logging; logging.basicConfig(format='mine %(message)s', level=logging.INFO)\n" + SCRIPT
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True, check=True)
    said = [line for line in run.stderr.splitlines() if "matmul (bf16)" in line]
    assert len(said) == 1
    assert said[0].startswith("mine ")
