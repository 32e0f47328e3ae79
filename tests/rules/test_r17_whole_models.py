"""R17 around a whole model: what a wrapper such as DeepSpeed's engine is told, and what is said where nothing of a model is cast."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch

import hmp
from autocast_kit import BF16, F32, LOW, X, muls

OFF = torch.autocast("cpu", enabled=False)


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


class Around(torch.nn.Module):
    """An engine that hmp does not know as one."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.model(x)


def _in_region(run):
    with torch.autocast("cuda", enabled=False):  # a script's `enabled=args.amp`
        torch.nn.MSELoss()(X, X)  # a module, and no model
        return run(X)


@pytest.mark.parametrize(
    ("how", "around"),
    [("convert", "script"), ("apply", "script"), ("apply", "engine"), pytest.param("convert", "compiled", marks=pytest.mark.slow)],
)
def test_r17_a_region_in_which_nothing_of_a_model_is_cast_is_named_once(how, around, caplog, request):
    if around == "compiled":
        request.getfixturevalue("fresh_compiler")
    model = hmp.apply(Model(), LOW) if how == "apply" else Model()
    run = Around(model) if around == "engine" else torch.compile(model, backend="eager") if around == "compiled" else model
    opener = Around.forward if around == "engine" else _in_region
    with hmp.convert(policy=LOW) if how == "convert" else contextlib.nullcontext():
        for _ in range(2):
            assert (run(X) if around == "engine" else _in_region(run)) == (F32, F32)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    place = f"{__file__}:{opener.__code__.co_firstlineno + 1}"
    assert said == (
        f"Model runs inside torch.autocast(enabled=False), opened at {place}, which switches hmp's casts off: nothing that policy 'low' "
        "lists is cast there. Leave that region away, or put the policy in force inside it: hmp.casts()"
    )


def test_r17_what_is_a_part_of_a_model_or_no_model_or_under_a_policy_is_not_named(caplog):
    class Parts(Model):
        def forward(self, x):
            with OFF:
                hidden = self.body(x)  # a submodule with weights, not all of them
            return torch.mul(self.head(hidden), x).dtype

    with hmp.convert(policy=LOW):
        assert Parts()(X) is BF16
        assert Model()(X) == (F32, BF16)
        with OFF:
            assert (muls(), torch.nn.MSELoss()(X, X).dtype) == (F32, F32)
            with hmp.casts(LOW):
                assert Model()(X) == (F32, BF16)
        with hmp.disable_casts(), OFF:
            Model()(X)  # off already
    with OFF:
        Model()(X)  # no policy speaks of it
    assert not caplog.records
