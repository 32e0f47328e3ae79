"""R17: the float32 islands that libraries build after asking for torch.autocast's state: transformers' and torch.amp.custom_fwd's."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import pytest
import torch

import hmp
from autocast_kit import BF16, F16, F32, is_real, real_state
from thread_kit import in_thread
from trap_kit import policy, same

# --- transformers.utils.generic.maybe_autocast


def test_r17_transformers_finds_the_dtype_for_flash_attention_and_its_islands_are_float32() -> None:
    """Models beyond position 1000, whose rotary embedding stands in such an island: tests/training/test_models_positions.py."""
    pytest.importorskip("transformers")
    from transformers.integrations.flash_attention import get_target_dtype
    from transformers.utils.generic import maybe_autocast

    query, module = torch.randn(1, 2, 3, 4), torch.nn.Linear(2, 2)
    module.config = object()
    for dtype in (BF16, F16):
        with hmp.casts(policy(bf16=["matmul"], dtype=dtype)):
            assert get_target_dtype(query, module) is dtype
            with maybe_autocast(device_type="cpu", enabled=False):
                assert torch.matmul(query, query.mT).dtype is F32
            assert torch.matmul(query, query.mT).dtype is dtype
    assert get_target_dtype(query, module) is F32


# --- torch.amp.custom_fwd and custom_bwd


def _product(device_type="cpu", cast_inputs=None):
    """x @ w whose backward multiplies the gradient with the saved w; it notes dtypes, hmp's casts and torch.autocast's real state."""

    class Product(torch.autograd.Function):
        notes: ClassVar[list[tuple[object, ...]]] = []

        @staticmethod
        @torch.amp.custom_fwd(device_type=device_type, cast_inputs=cast_inputs)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            Product.notes.append(("forward", x.dtype, hmp.casts_enabled(), real_state()))
            return torch.matmul(x, w)

        @staticmethod
        @torch.amp.custom_bwd(device_type=device_type)
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            Product.notes.append(("backward", grad.dtype, hmp.casts_enabled(), real_state()))
            return torch.matmul(grad, w.t()), torch.matmul(x.t(), grad)

    return Product


# made before any convert(), as libraries do when they are imported
PLAIN = _product()
TO_F32 = _product(cast_inputs=F32)
TO_BF16 = _product(cast_inputs=BF16)
MATMUL = policy(bf16=["matmul"])


@pytest.fixture(autouse=True)
def no_notes():
    for function in (PLAIN, TO_F32, TO_BF16):
        function.notes.clear()


def _leaves(dtype=F32):
    return torch.randn(3, 4, dtype=dtype, requires_grad=True), torch.randn(4, 5, requires_grad=True)


def test_r17_custom_bwd_runs_under_the_casts_of_its_forward():
    x, w = _leaves()
    off = real_state()
    with hmp.casts(MATMUL):
        y = PLAIN.apply(x, w)
        assert hmp.casts_enabled() and real_state() == off
    y.backward(torch.ones(3, 5, dtype=BF16))
    assert PLAIN.notes == [("forward", F32, True, off), ("backward", BF16, True, off)]
    low_x, low_w, grad = x.detach().to(BF16), w.detach().to(BF16), torch.ones(3, 5, dtype=BF16)
    same(y, low_x @ low_w)
    same(x.grad, (grad @ low_w.t()).float())
    same(w.grad, (low_x.t() @ grad).float())
    assert real_state() == off
    assert not hmp.casts_enabled()


def test_r17_custom_bwd_wherever_backward_is_called():
    with hmp.convert(policy=MATMUL):
        for call in (lambda loss: loss.backward(), hmp.disable_casts(lambda loss: loss.backward()), lambda loss: in_thread(loss.backward)):
            PLAIN.notes.clear()
            call(PLAIN.apply(*_leaves()).float().sum())
            assert hmp.casts_enabled()
            assert [note[:3] for note in PLAIN.notes] == [("forward", F32, True), ("backward", BF16, True)]


def test_r17_custom_bwd_without_casts_in_its_forward():
    x, w = _leaves()
    with hmp.casts(MATMUL):
        with hmp.disable_casts():
            y = PLAIN.apply(x, w)
        with torch.autocast("cpu", enabled=False):
            z = PLAIN.apply(x, w)
        (y.sum() + z.sum()).backward()
    assert [note[2] for note in PLAIN.notes] == [False] * 4


def test_r17_custom_bwd_under_another_policy_than_its_forward_runs_as_any_backward():
    x, w = _leaves()
    with hmp.convert(policy=MATMUL):
        y = PLAIN.apply(x, w).float()
    with hmp.convert(policy=policy(fp32=["matmul"])):
        y.sum().backward()
        assert hmp.casts_enabled()
    assert PLAIN.notes[-1][:3] == ("backward", BF16, False)


def test_r17_custom_fwd_keeps_real_autocast_as_torch_has_it():
    x, w = _leaves()

    def run(casts):
        PLAIN.notes.clear()
        with casts, torch.autocast("cpu", dtype=F16):
            loss = PLAIN.apply(x, w).float().sum()
        loss.backward()
        return [note[-1] for note in PLAIN.notes]

    alone = run(contextlib.nullcontext())
    assert [state[0] for state in alone] == [(True, F16)] * 2  # torch itself enables autocast for this backward
    assert run(hmp.casts(MATMUL)) == alone
    assert [note[2] for note in PLAIN.notes] == [True, True]


def test_r17_custom_fwd_with_cast_inputs_is_an_island():
    off = real_state()
    for function, dtype in ((TO_F32, F32), (TO_BF16, BF16)):
        x, w = _leaves(BF16)
        with hmp.casts(MATMUL):
            y = function.apply(x, w)
            assert hmp.casts_enabled()
            y.backward(torch.ones(3, 5, dtype=dtype))
        assert function.notes == [("forward", dtype, False, off), ("backward", dtype, False, off)]
        same(y, x.detach().to(dtype) @ w.detach().to(dtype))
        same(x.grad, (torch.ones(3, 5, dtype=dtype) @ w.detach().to(dtype).t()).to(BF16))


def test_r17_custom_fwd_with_cast_inputs_outside_hmp_is_torchs_own():
    x, w = _leaves()
    with hmp.casts(MATMUL), hmp.disable_casts():
        same(TO_BF16.apply(x, w), x @ w)  # torch casts nothing where autocast is off
    expected = x @ w
    with hmp.casts(MATMUL), hmp.disable_casts(), torch.autocast("cpu"):
        same(TO_F32.apply(x, w), expected)  # torch's own island


def test_r17_an_error_in_custom_bwd_leaves_no_trace():
    class Fails(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            assert hmp.casts_enabled()
            raise ZeroDivisionError

    with hmp.casts(MATMUL):
        y = Fails.apply(torch.ones(2, requires_grad=True))
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert not hmp.casts_enabled()
    assert not is_real()
