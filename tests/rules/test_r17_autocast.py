"""R17: where hmp casts, torch says that autocast is enabled; where torch.autocast is enabled as well, it has the last word."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import hmp
from autocast_kit import BF16, F16, F32, HALF, HERE, LOW, OFF, muls, real_state
from trap_kit import policy, same


def test_r17_torchs_questions_are_answered_by_the_policy_and_by_real_autocast_on_its_own_device():
    for each, low in ((LOW, BF16), (HALF, F16)):
        with hmp.casts(each), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled(device_type="mps") is True
            for device in ("cpu", "cuda", "xpu", "hpu", "xla"):
                assert torch.is_autocast_enabled(device) is True, device
            for device in ("cpu", "cuda", "xpu", "hpu"):
                assert torch.get_autocast_dtype(device) is torch.get_autocast_dtype(device_type=device) is low, device
            assert torch.is_autocast_cpu_enabled() is torch.is_autocast_xla_enabled() is True
            for name in ("gpu", "cpu", "xla"):
                assert getattr(torch, f"get_autocast_{name}_dtype")() is low, name
            assert real_state()[:2] == OFF[:2]
            with torch.autocast("cpu", dtype=F16):
                assert (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")) == (F16, low)
                assert (torch.get_autocast_cpu_dtype(), torch.get_autocast_gpu_dtype()) == (F16, low)


def test_r17_errors_of_the_questions_are_torchs_own():
    def errors():
        for ask in (
            lambda: torch.is_autocast_enabled("nonsense"),
            lambda: torch.is_autocast_enabled(1),
            lambda: torch.is_autocast_enabled("cpu", "cpu"),
            lambda: torch.get_autocast_dtype("meta"),
            lambda: torch.get_autocast_dtype(),
        ):
            with pytest.raises((RuntimeError, TypeError)) as caught:
                ask()
            yield type(caught.value), str(caught.value)

    expected = list(errors())
    with hmp.casts(LOW):
        assert list(errors()) == expected


def test_r17_code_of_torch_gets_torchs_own_answer():
    from torch._functorch._aot_autograd.utils import _get_autocast_states
    from torch.utils.checkpoint import _get_autocast_kwargs

    expected = _get_autocast_kwargs("cuda"), _get_autocast_states()
    with hmp.casts(LOW):
        assert (_get_autocast_kwargs("cuda"), _get_autocast_states()) == expected
        assert torch.autocast("cuda", enabled=False).fast_dtype is F16  # a new region's default is torch's, not the policy's


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA the call ends at the first graph, right after it asked for autocast")
def test_r17_cuda_graphs_are_not_refused_because_of_hmp():
    with hmp.casts(LOW), pytest.raises(RuntimeError, match="CUDA"):
        torch.cuda.make_graphed_callables(torch.nn.Linear(1, 1), (torch.ones(1),))


def test_r17_hmp_casts_first_and_autocast_has_the_last_word():
    # matmul is on autocast's low list, softmax on its float32 list
    mine = policy(bf16=["mul", "softmax"], fp32=["matmul"])
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    expected = torch.matmul(a.to(F32).to(F16), b.to(F16))
    with hmp.casts(mine), torch.autocast(HERE, dtype=F16):
        same(torch.matmul(a, b), expected)
        same(torch.softmax(a, 0), torch.softmax(a.to(BF16).float(), 0))
        assert muls() is BF16


def _said(caplog):
    return [record for record in caplog.records if record.name == "hmp" and "is enabled where hmp casts" in record.getMessage()]


@pytest.mark.usefixtures("unpatched")
def test_r17_the_log_says_so_once_until_revert(caplog):
    caplog.set_level(logging.INFO, logger="hmp")
    with hmp.casts(LOW):
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            pass
        with hmp.disable_casts(), torch.autocast("cpu"):
            pass
        assert not _said(caplog)  # nothing is cast where torch.autocast is enabled
        for _ in range(3):
            with torch.autocast("cpu"):
                pass
    assert len(_said(caplog)) == 1
    hmp.revert()
    with torch.autocast("cpu"):
        assert len(_said(caplog)) == 1
        hmp.convert(policy=LOW)
    assert len(_said(caplog)) == 2
