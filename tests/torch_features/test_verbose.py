"""isVerbose: the policy in force, then every distinct decision once, through the logger `hmp`."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
import torch.nn.functional as F

import hmp
from process_kit import run_in_another_process


@pytest.fixture(autouse=True)
def listening(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hmp")


def decisions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hmp" and " at " in r.getMessage()]


def test_verbose_names_the_policy_and_says_op_place_inputs_and_casts(caplog: pytest.LogCaptureFixture) -> None:
    a = torch.randn(2, 2)
    hmp.convert(isVerbose=True)
    assert all(name in caplog.text for name in ("policy 'habana'", "conv_transpose3d", "binary_cross_entropy_with_logits"))
    a @ a.to(torch.bfloat16)
    line = sys._getframe().f_lineno - 1
    (said,) = decisions(caplog)
    assert said.startswith("matmul (bf16)")
    assert all(part in said for part in (f"{__file__}:{line}", "inputs float32, bfloat16", "float32 -> bfloat16"))


def test_a_module_that_a_policy_is_applied_to_tells_of_its_own_calls(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    assert hmp.apply(model, "bert", verbose=True) is model
    assert "policy 'bert'" in caplog.text
    for _ in range(2):
        model(torch.ones(1, 2))
    (said,) = decisions(caplog)
    hmp.apply(model, "bert")
    model(torch.ones(1, 2).bfloat16())
    assert said.startswith("linear (bf16)") and said.endswith("float32 -> bfloat16")
    assert decisions(caplog) == [said]


def test_verbose_says_a_decision_once_and_another_anew_as_long_as_it_is_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    a = torch.randn(2, 2)
    with hmp.convert(isVerbose=True):
        with hmp.disable_casts():
            F.softmax(a, dim=-1)
        assert decisions(caplog) == []
        for operand in (a, a, a.to(torch.bfloat16)):
            F.softmax(operand, dim=-1)
        said = decisions(caplog)
        assert len(said) == 2  # float32 twice is one decision, bfloat16 another
        assert "nothing to cast" in said[0] and "bfloat16 -> float32" in said[1]
    F.softmax(a.double(), dim=-1)
    hmp.convert()
    F.softmax(a.half(), dim=-1)
    assert decisions(caplog) == said


SCRIPT = """
import contextlib, io, logging
for rank, everybody, speaks in (("0", "", True), ("1", "", False), ("1", "1", True)):
    os.environ |= {"RANK": rank, "HMP_LOG_ALL_RANKS": everybody}
    logging.getLogger("hmp").handlers.clear()
    with contextlib.redirect_stderr(io.StringIO()) as said, hmp.convert(isVerbose=True):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert ("matmul (bf16)" in said.getvalue()) is speaks is ("policy 'habana'" in said.getvalue()), (rank, said.getvalue())
logging.getLogger("hmp").handlers.clear()
logging.basicConfig(format="mine %(message)s", level=logging.INFO, stream=sys.stdout)
with hmp.convert(isVerbose=True):
    torch.ones(2, 2) @ torch.ones(2, 2)
"""


@pytest.mark.slow
def test_verbose_goes_to_stderr_of_rank_0_alone_and_where_a_handler_is_configured_to_that() -> None:
    said = [line for line in run_in_another_process("import os\n" + SCRIPT).splitlines() if "matmul (bf16)" in line]
    assert len(said) == 1 and said[0].startswith("mine ")
