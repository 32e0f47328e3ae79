"""What casts where nobody names a policy, what is refused, and what is logged: isVerbose tells the policy, then each decision once."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from process_kit import run_in_another_process


class Net(nn.Module):
    """Products, a norm, a softmax, and a `*` that torch.autocast leaves alone and Habana's list does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.full((16,), 1.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.relu(self.norm(self.first(x))) * self.scale), -1)


def losses(model: nn.Module, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with around():
            out = model(x)
        loss = (out.float() - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_region_and_an_applied_model_train_as_under_torch_autocast() -> None:
    net = Net()
    expected = losses(copy.deepcopy(net), lambda: torch.autocast("cpu", torch.bfloat16))
    assert expected != losses(copy.deepcopy(net)), "float32 would pass too"
    assert expected != losses(copy.deepcopy(net), lambda: hmp.casts("habana")), "Habana's list would pass too"
    assert losses(copy.deepcopy(net), hmp.casts) == expected
    assert losses(hmp.apply(copy.deepcopy(net))) == expected
    assert {row.op for row in hmp.compare(net, torch.randn(4, 8)).rows if row.dtype == "bfloat16" and row.listed} == {"linear"}


@pytest.mark.native_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "float16"])
def test_dtype_is_the_low_dtype_as_in_torch_autocast(dtype: Any) -> None:
    net, low = Net(), torch.bfloat16 if dtype is torch.bfloat16 else torch.float16
    expected = losses(copy.deepcopy(net), lambda: torch.autocast("cpu", low))
    assert losses(copy.deepcopy(net), lambda: hmp.casts(dtype=dtype)) == expected
    assert losses(hmp.apply(copy.deepcopy(net), dtype=dtype)) == expected
    x = torch.ones(2, 2)
    assert hmp.casts(lambda: x @ x, dtype=dtype)().dtype is low
    for policy in ("habana", "apex-o1", hmp.Policy(bf16={"matmul"}), hmp.Policy(bf16={"matmul"}, dtype=torch.float16)):
        before = hmp.Policy.load(policy) if isinstance(policy, str) else policy
        with hmp.casts(policy, dtype=dtype):
            assert (x @ x).dtype is low
        applied = hmp.apply(nn.Linear(2, 2), before.move("linear", "bf16"), dtype=dtype)
        assert applied(x).dtype is copy.deepcopy(applied)(x).dtype is low
        with hmp.convert(policy=policy, dtype=dtype):
            assert (x @ x).dtype is low
        with hmp.casts(policy):
            assert (x @ x).dtype is before.dtype, "the policy itself was changed"


def test_a_dtype_that_is_not_low_is_refused_with_one_sentence() -> None:
    for wrong in (torch.float32, torch.int8, "fp8", 16):
        for call in (hmp.casts, hmp.convert, lambda dtype: hmp.apply(nn.Linear(2, 2), dtype=dtype), lambda dtype: hmp.Policy(dtype=dtype)):
            with pytest.raises(hmp.HmpError) as error:
                call(dtype=wrong)
            assert str(error.value) == f"dtype= expected torch.bfloat16 or torch.float16, got {wrong!r}"


def test_habanas_own_call(tmp_path: Path) -> None:
    (tmp_path / "bf16.txt").write_bytes(b"\xef\xbb\xbf# mine\r\nsoftmax  # entry\r\n\r\n")
    (tmp_path / "fp32.txt").write_bytes(b"gelu, log_softmax")
    with hmp.convert(opt_level="O1", bf16_file_path=str(tmp_path / "bf16.txt"), fp32_file_path=str(tmp_path / "fp32.txt")):
        assert torch.softmax(torch.ones(2), 0).dtype is torch.bfloat16
        # "" elsewhere means the default list: here promote
        assert torch.cat([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)]).dtype is torch.float32
        assert "bf16.txt" in str(hmp.explain("softmax"))
    # None is what argparse gives a script for an option that was left out
    with hmp.convert("O1", None, None, False, promote_file_path=None, fp8_file_path=None):
        assert hmp.explain("linear") == hmp.explain("linear", "habana")
    with hmp.convert(policy="bert", bf16_file_path=None):
        assert hmp.explain("softmax").policy == "bert"


# --- what convert(), casts() and remove() refuse, with torch as it was


@pytest.mark.parametrize("policy", ["habana", hmp.Policy(bf16={"linear @ 0"})], ids=["without scopes", "with scopes"])
def test_a_model_that_is_no_module_is_refused(policy: Any, torch_differences: Callable[[], list[str]]) -> None:
    for given in (3, "model", torch.nn.Linear):
        for call in (lambda model: hmp.convert(policy=policy, model=model), lambda model: hmp.casts(policy, model=model), hmp.remove):
            with pytest.raises(hmp.HmpError, match=type(given).__name__):
                call(given)  # type: ignore[operator]
    assert torch_differences() == [] and not hmp.is_converted()


# --- trainable weights in a low-precision dtype


def test_the_log_tells_once_that_a_policy_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (hmp.Policy(name, bf16={"linear"}, fp32=wide) for name, wide in (("the first", {"exp"}), ("the second", {"log"})))
    model = hmp.apply(torch.nn.Linear(2, 2), first)
    for policy in (first, second, second, first, second):
        hmp.apply(model, policy)
    assert [record.getMessage().split("; ")[0] for record in caplog.records] == [
        "hmp.apply() of 'the second' in bfloat16 replaces the policy 'the first' in bfloat16 of a Linear",
        "hmp.apply() of 'the first' in bfloat16 replaces the policy 'the second' in bfloat16 of a Linear",
    ]


def test_the_log_tells_once_of_trainable_low_weights(caplog: pytest.LogCaptureFixture) -> None:
    def told(model: torch.nn.Module) -> list[str]:
        caplog.clear()
        hmp.apply(model, "torch-cpu")
        return [each.getMessage() for each in caplog.records if "small updates" in each.getMessage()]

    other, model = torch.nn.Bilinear(4, 4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
    first = told(model)
    assert len(first) == 1 and "4 trainable weights of Sequential are in bfloat16" in first[0] and "model.float()" in first[0]
    assert told(model) == []
    assert told(other) == told(other.bfloat16().requires_grad_(False)) == []
    assert told(other.requires_grad_())[0].startswith("2 trainable weights of Bilinear")


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
