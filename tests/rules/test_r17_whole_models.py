"""R17 around a whole model: what a wrapper such as DeepSpeed's engine is told, and its model."""

from __future__ import annotations

import contextlib

import pytest
import torch

import hmp
from autocast_kit import BF16, F32, LOW, X


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

    def asks(self):
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cuda") is BF16

    def __call__(self, x):
        with torch.autocast("cpu", enabled=False) if self.asks()[0] else contextlib.nullcontext():
            return self.module(x)


@pytest.mark.parametrize("how", ["convert", "casts", "apply", "apply to the wrapper"])
def test_r17_a_wrapper_that_asks_is_told_of_regions_around_it_and_the_model_of_casts(how, caplog):
    model = Model()
    engine = Engine(hmp.apply(model, LOW) if how == "apply" else model)
    if how == "apply to the wrapper":
        hmp.apply(engine, LOW)
    with hmp.convert(policy=LOW) if how == "convert" else hmp.casts(LOW) if how == "casts" else contextlib.nullcontext():
        assert engine(X) == (F32, BF16)
        assert engine.asks() == (False, False)
    with torch.autocast("cpu", BF16):
        assert engine.asks()[0]
    assert not caplog.records
