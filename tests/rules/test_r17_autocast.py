"""R17: where hmp casts, torch says that autocast is enabled; where torch.autocast is enabled as well, it has the last word."""

from __future__ import annotations

import contextlib
import logging
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hmp
from autocast_kit import BF16, F16, F32, HALF, HERE, LOW, OFF, is_real, muls, real_state
from process_kit import alone
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


# --- torch's own machinery that copies the autocast state does not switch real autocast on


REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


# --- checkpoint


def _checkpointed(reentrant, region=contextlib.nullcontext, **kwargs):
    """Runs a checkpointed product, and gives what each of its two runs saw: result's dtype, mul's dtype, torch.autocast's state."""
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    runs: list[tuple[object, ...]] = []

    def block(x):
        with region():
            y = torch.matmul(x, w)
            runs.append((y.dtype, muls(), real_state()))
        return torch.sin(y)

    checkpoint(block, x, use_reentrant=reentrant, **kwargs).float().sum().backward()
    assert len(runs) == 2
    return runs


def _off():
    return torch.autocast("cpu", enabled=False)


def _on():
    return torch.autocast("cpu", dtype=BF16)


@REENTRANT
def test_r17_checkpoint_recomputes_under_the_autocast_of_its_forward_and_in_its_regions(reentrant):
    off = real_state()
    with hmp.casts(LOW):
        for options in ({}, {"preserve_rng_state": False}):
            assert _checkpointed(reentrant, **options) == [(F32, BF16, off)] * 2
        with torch.autocast("cpu", dtype=F16):
            on = real_state()
            assert on[0] == (True, F16)
            assert _checkpointed(reentrant) == [(F16, BF16, on)] * 2
            with _off():
                assert [run[:2] for run in _checkpointed(reentrant)] == [(F32, F32)] * 2
    assert real_state() == off
    with hmp.casts(HALF):
        for around, region, wanted in (
            (contextlib.nullcontext, _off, (F32, F32)),
            (contextlib.nullcontext, _on, (BF16, F16)),
            (_off, contextlib.nullcontext, (F32, F32)),
            (_off, _on, (BF16, F16)),
            (hmp.disable_casts, _on, (BF16, F32)),
        ):
            with around():
                assert [run[:2] for run in _checkpointed(reentrant, region)] == [wanted] * 2


@REENTRANT
def test_r17_checkpoint_of_a_custom_function(reentrant):
    notes = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x, w):
            ctx.save_for_backward(w)
            notes.append(("forward", hmp.casts_enabled(), is_real()))
            return torch.matmul(x, w)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            notes.append(("backward", hmp.casts_enabled(), is_real()))
            return torch.matmul(grad, ctx.saved_tensors[0].t()), None

    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    with hmp.casts(policy(bf16=["matmul"])):
        y = checkpoint(lambda x: Product.apply(x, w), x, use_reentrant=reentrant)
    y.backward(torch.ones(3, 3, dtype=BF16))
    # one of the two checkpoints recomputes when the backward asks for what was saved
    assert sorted(notes) == [("backward", True, False)] + [("forward", True, False)] * 2
    same(x.grad, (torch.ones(3, 3, dtype=BF16) @ w.to(BF16).t()).float())


# --- torch.jit, and tables


@pytest.mark.slow
def test_r17_scripted_code_is_compiled_as_without_hmp(tmp_path):
    alone(
        tmp_path,
        """
        import torch, hmp
        from autocast_kit import *

        def asks() -> bool:
            return torch.is_autocast_enabled()

        def region(x: torch.Tensor):
            with torch.autocast("cpu", enabled=False):
                y = torch.mm(x, x)
            with torch.autocast("cpu"):
                z = torch.mm(x, x)
            return y, z

        def dtypes(function):
            return [t.dtype for t in function(torch.ones(2, 2))]

        expected = [F32, BF16]
        with hmp.casts(LOW):  # torch fills its table of scriptable functions here
            assert torch.jit.script(asks)() is False
            assert dtypes(torch.jit.script(region)) == expected
        hmp.revert()
        assert torch.jit.script(asks)() is False
        assert dtypes(torch.jit.script(region)) == expected
        """,
    )


@pytest.mark.slow
def test_r17_tables_that_torch_fills_meanwhile_hold_torchs_own_functions(tmp_path):
    alone(
        tmp_path,
        """
        import types
        import torch, hmp

        functions = {getattr(torch, name) for name in dir(torch) if "autocast" in name}
        own = {each for each in functions if each.__name__.startswith(("is_", "get_"))}
        hmp.convert()
        import torch._dynamo.variables.torch as variables
        torch.overrides.get_overridable_functions()
        hmp.revert()

        constants = [each for each in variables.constant_fold_functions if "autocast" in each.__name__]
        assert torch.is_autocast_enabled in constants and torch.get_autocast_dtype in constants
        assert set(constants) <= functions | {torch._C._is_any_autocast_enabled}
        assert own <= torch.overrides.get_ignored_functions()
        overridable = [each for functions in torch.overrides.get_overridable_functions().values() for each in functions]
        assert not [each for each in overridable if isinstance(each, types.FunctionType) and "autocast" in each.__name__]

        compiled = torch.compile(lambda x: x if torch.is_autocast_enabled("cpu") else x + 1, backend="eager", fullgraph=True)
        assert compiled(torch.ones(1)).item() == 2
        """,
    )
