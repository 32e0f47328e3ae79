"""Recurrent modules under `torch-cpu` have what they have under torch.autocast("cpu"), bit for bit: results, dtypes and the gradients
of inputs; those of weights as with a cast for each use, `cache_enabled=False`, which are summed in float32 (R21)."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import hmp
from oracle import BF16, F32, tensors

pytestmark = pytest.mark.native_kernels
BATCH, INPUT, HIDDEN, LENGTHS = 3, 4, 6, torch.tensor([5, 3, 2])
# Of layers and of cells: the module's options, then what it is called with. `state` is the dtype of the first state, if there is one.
CALLED = {"grad": (False, True), "input": (F32, BF16), "state": (None, F32, BF16)}
LAYER = {"bidirectional": (False, True), "num_layers": (1, 2), "proj_size": (0, 3), "dropout": (0.0, 0.3), "packed": (False, True)}
Config = dict[str, Any]


def configs(kind: str) -> list[Config]:
    options = {"bias": (True, False), **({} if "Cell" in kind else LAYER), **CALLED}
    found = [{"kind": kind, **dict(zip(options, values, strict=True))} for values in itertools.product(*options.values())]
    return [each for each in found if kind == "LSTM" or not each.get("proj_size")]


KINDS = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
ALL = [config for kind in KINDS for config in configs(kind)]
EVERY = 23  # of the default run, one in so many; it divides no number of choices


def made(config: Config) -> torch.nn.Module:
    torch.default_generator.manual_seed(0)
    given = {name: value for name, value in config.items() if name in LAYER and name != "packed" and value}
    if config["kind"].startswith("RNN"):
        given["nonlinearity"] = "relu"
    return getattr(torch.nn, config["kind"])(INPUT, HIDDEN, bias=config["bias"], **given)


def inputs(config: Config) -> tuple[Any, list[torch.Tensor]]:
    """The input, and the first states: none, one, or two for an LSTM."""
    torch.default_generator.manual_seed(1)
    if "Cell" in config["kind"]:
        x: Any = torch.randn(BATCH, INPUT)
        shapes = [(BATCH, HIDDEN)] * 2
    else:
        x, depth = torch.randn(5, BATCH, INPUT), config["num_layers"] * (1 + config["bidirectional"])
        shapes = [(depth, BATCH, config["proj_size"] or HIDDEN), (depth, BATCH, HIDDEN)]
    x = x.to(config["input"])
    if config.get("packed"):
        x = pack_padded_sequence(x, LENGTHS)
    count = 0 if config["state"] is None else 1 + config["kind"].startswith("LSTM")
    return x, [torch.randn(shape).to(config["state"]) for shape in shapes[:count]]


def run(config: Config, around: AbstractContextManager[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Results and gradients: of the input, of the states, of the parameters."""
    module, (x, state) = made(config), inputs(config)
    data = (x.data if config.get("packed") else x).requires_grad_(config["grad"])
    x = x._replace(data=data) if config.get("packed") else data
    state = [t.requires_grad_(config["grad"]) for t in state]
    torch.default_generator.manual_seed(2)  # dropout
    with torch.set_grad_enabled(config["grad"]):
        with around:
            found = module(x, *((tuple(state),) if len(state) == 2 else state))
        parts = found if isinstance(found, tuple) else [found]
        results = [t for part in parts for t in ([part.data] if isinstance(part, PackedSequence) else tensors([part]))]
        if not config["grad"]:
            return results, []
        loss = torch.stack([r.float().square().sum() for r in results]).sum()
        return results, list(torch.autograd.grad(loss, [data, *state, *module.parameters()], allow_unused=True))


def autocast(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16, **options)


def runs_with_onednn(config: Config) -> bool:
    """oneDNN has not every LSTM for every processor: where torch.autocast itself raises, torch's own kernels are compared."""
    try:
        run(config, autocast())
    except RuntimeError as error:
        assert "could not create a primitive" in str(error), error
        return False
    return True


def differing(chosen: list[Config]) -> list[str]:
    found = []
    for config in chosen:
        with torch.backends.mkldnn.flags(enabled=runs_with_onednn(config)):
            results, once = run(config, autocast())
            _, each = run(config, autocast(cache_enabled=False))
            got, gradients = run(config, hmp.casts("torch-cpu"))
        count = len(once) - len(list(made(config).parameters())) if once else 0
        # oneDNN gives the gradients of an LSTM's weights in float32, which torch.autocast rounds and hmp does not
        error = 2 * torch.finfo(BF16).eps if config["kind"] == "LSTM" else 0.0
        pairs = [(one, other, 0.0) for one, other in zip([*got, *gradients[:count]], [*results, *once[:count]], strict=True)]
        pairs += [(one, other, error) for one, other in zip(gradients[count:], each[count:], strict=True)]
        found += [str(config)] if not all(itertools.starmap(_near, pairs)) else []
    return found


def _near(one: torch.Tensor | None, other: torch.Tensor | None, error: float) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype is other.dtype and (torch.equal(one, other) or bool((one - other).norm() < error * other.norm()))


@pytest.mark.parametrize("kind", KINDS)
def test_one_configuration_in_many_has_autocasts_bits(kind: str) -> None:
    found = configs(kind)
    chosen = found[:: EVERY if len(found) > 100 else 5]
    assert len(chosen) >= 5
    assert differing(chosen) == []


@pytest.mark.parametrize("part", [pytest.param(at, marks=pytest.mark.nightly if at else pytest.mark.slow) for at in range(8)])
def test_every_configuration_has_autocasts_bits(part: int) -> None:
    assert len(ALL) > 700
    assert differing(ALL[part::8]) == []
