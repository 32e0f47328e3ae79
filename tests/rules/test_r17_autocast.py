"""R17: where hmp casts, torch says that autocast is enabled; where torch.autocast is enabled as well, it has the last word.

A disabled region acts as disable_casts(), and so do the float32 islands that libraries build after asking for torch.autocast's state.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import ClassVar

import pytest
import torch

import hmp
from autocast_kit import BF16, F16, F32, HALF, HERE, LOW, OFF, X, is_real, muls, real_state
from thread_kit import in_thread
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


DISABLED = [
    lambda: torch.autocast("cpu", enabled=False),
    lambda: torch.autocast("cuda", enabled=False),
    lambda: torch.amp.autocast("cpu", BF16, False),
    lambda: torch.cuda.amp.autocast(enabled=False),
    lambda: torch.cpu.amp.autocast(False),
]
OLD_NAMES = pytest.mark.filterwarnings("ignore:.*amp.autocast.*:FutureWarning")


@OLD_NAMES
def test_r17_autocast_disabled_region_acts_as_disable_casts_also_as_a_decorator():
    expected = torch.mul(X, X)
    for disabled in DISABLED:
        hmp.revert()
        decorated = disabled()(muls)  # made before hmp did anything
        with disabled() as entered_without_hmp:
            pass
        with hmp.casts(LOW):
            with disabled() as entered:
                same(torch.mul(X, X), expected)
                assert not hmp.casts_enabled()
            assert type(entered) is type(entered_without_hmp)
            assert hmp.casts_enabled() and muls() is BF16
            assert real_state()[:2] == OFF[:2]
            assert (decorated(), muls()) == (F32, BF16)
            made_inside = disabled()(muls)
            assert (made_inside(), muls()) == (F32, BF16)


def test_r17_autocast_disabled_by_enter_and_exit_functions():
    with hmp.casts(LOW):
        mode = torch.amp.autocast_mode._enter_autocast("cpu", None, False, None)
        assert muls() is F32
        torch.amp.autocast_mode._exit_autocast(mode)
        assert muls() is BF16


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch disables torch.autocast('cuda') itself only without CUDA")
@pytest.mark.filterwarnings("ignore:.*amp.autocast.*:FutureWarning")
@pytest.mark.parametrize(
    "make", [lambda: torch.autocast("cuda"), lambda: torch.cuda.amp.autocast(), lambda: torch.autocast("cpu", dtype=F32)]
)
def test_r17_a_region_that_torch_itself_disables_is_no_request_to_disable(make):
    with hmp.casts(LOW):
        with pytest.warns(UserWarning, match="Disabling"):
            region = make()
        with region:
            assert not any(enabled for enabled, _ in real_state()[:2])
            assert muls() is BF16
        with torch.autocast("cpu", enabled=False), region:
            assert muls() is BF16  # it asks to enable


@pytest.mark.usefixtures("unpatched")
def test_r17_a_disabled_region_counts_as_long_as_it_lasts():
    with torch.autocast("cpu", enabled=False):
        hmp.convert(policy=LOW)  # the region began unseen
        assert muls() is BF16
    assert muls() is BF16
    with torch.autocast("cpu", enabled=False):
        hmp.revert()  # its end will be unseen
        assert muls() is F32
    hmp.convert(policy=LOW)
    assert muls() is BF16
    with torch.autocast("cpu", enabled=False):
        assert muls() is F32
        hmp.convert(policy=HALF)
        assert muls() is F32
    assert muls() is F16


def test_r17_a_region_whose_end_was_unseen_has_no_effect_on_later_ones():
    hmp.convert(policy=LOW)
    with torch.autocast("cpu", enabled=False):
        hmp.revert()
    hmp.convert(policy=LOW)
    with contextlib.ExitStack() as enabled:
        enabled.enter_context(torch.autocast("cpu"))
        with hmp.casts(HALF):
            enabled.close()
            assert muls() is F16


def test_r17_regions_left_out_of_order():
    outer, inner = torch.autocast("cpu", enabled=False), torch.autocast("cpu", enabled=False)
    with hmp.casts(LOW):
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        assert muls() is BF16  # as torch.autocast: what was there when it was entered
        inner.__exit__(None, None, None)
    assert muls() is F32


# --- around a whole model: what a wrapper such as DeepSpeed's engine is told


class Model(torch.nn.Module):
    """Has a float32 island as transformers' models have, and returns the dtypes of a product inside and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext():
            island = torch.mul(self.body(x), x).dtype
        return island, torch.mul(self.head(x), x).dtype


class Engine(torch.nn.DataParallel):
    """Sees to torch.autocast as DeepSpeed's engine does: a region that its own settings know nothing of ends at its door."""

    def __init__(self, module: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.module = module

    def __call__(self, x):
        self.told = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cuda") is BF16
        with torch.autocast("cpu", enabled=False) if self.told[0] else contextlib.nullcontext():
            return self.module(x)


@pytest.mark.parametrize("how", ["convert", "casts", "apply", "apply to the wrapper"])
def test_r17_a_wrapper_that_asks_is_told_of_regions_around_it_and_the_model_of_casts(how, caplog):
    model = Model()
    engine = Engine(hmp.apply(model, LOW) if how == "apply" else model)
    if how == "apply to the wrapper":
        hmp.apply(engine, LOW)
    with hmp.convert(policy=LOW) if how == "convert" else hmp.casts(LOW) if how == "casts" else contextlib.nullcontext():
        assert engine(X) == (F32, BF16)
        assert engine.told == (False, False)
    assert not caplog.records
    with hmp.casts(LOW), torch.autocast("cpu", BF16):
        engine = Engine(Model())
        assert (engine(X), engine.told) == ((F32, F32), (True, False))


# --- transformers.utils.generic.maybe_autocast


def test_r17_transformers_finds_the_dtype_for_flash_attention_and_its_islands_are_float32() -> None:
    """Models beyond position 1000, whose rotary embedding stands in such an island: tests/training/test_whole_models.py."""
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
