"""R17: a disabled region of torch.autocast acts as disable_casts(); torch.autocast's real state, whatever the nesting."""

from __future__ import annotations

import contextlib

import pytest
import torch

import hmp
from autocast_kit import BF16, F16, F32, HALF, LOW, OFF, X, muls, real_state
from trap_kit import same

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
    with contextlib.ExitStack() as enabled:
        enabled.enter_context(torch.autocast("cpu"))
        with hmp.casts(LOW):
            enabled.close()
            assert muls() is BF16  # it changed nothing when it was entered


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
