"""R17: torch's own machinery that copies the autocast state does not switch real autocast on because hmp answers for it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hmp
from autocast_kit import BF16, F16, F32, HALF, LOW, is_real, muls, real_state
from process_kit import alone
from trap_kit import policy, same

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


@REENTRANT
def test_r17_checkpoint_recomputes_without_real_autocast(reentrant):
    off = real_state()
    with hmp.casts(LOW):
        assert _checkpointed(reentrant) == [(F32, BF16, off)] * 2
        assert _checkpointed(reentrant, preserve_rng_state=False) == [(F32, BF16, off)] * 2
    assert real_state() == off


@REENTRANT
def test_r17_checkpoint_recomputes_under_real_autocast_where_it_was_enabled(reentrant):
    with hmp.casts(LOW), torch.autocast("cpu", dtype=F16):
        on = real_state()
        assert on[0] == (True, F16)
        assert _checkpointed(reentrant) == [(F16, BF16, on)] * 2
        with torch.autocast("cpu", enabled=False):
            assert [run[:2] for run in _checkpointed(reentrant)] == [(F32, F32)] * 2


@REENTRANT
def test_r17_checkpoint_recomputes_autocast_regions_inside_it_as_its_forward_ran_them(reentrant):
    def disabled():
        return torch.autocast("cpu", enabled=False)

    def enabled():
        return torch.autocast("cpu", dtype=BF16)

    with hmp.casts(HALF):
        assert [run[:2] for run in _checkpointed(reentrant, disabled)] == [(F32, F32)] * 2
        assert [run[:2] for run in _checkpointed(reentrant, enabled)] == [(BF16, F16)] * 2
        with disabled():
            assert [run[:2] for run in _checkpointed(reentrant)] == [(F32, F32)] * 2
            assert [run[:2] for run in _checkpointed(reentrant, enabled)] == [(BF16, F16)] * 2
        with hmp.disable_casts():
            assert [run[:2] for run in _checkpointed(reentrant, enabled)] == [(BF16, F32)] * 2


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
