"""Recurrent modules under `torch-cpu` have what they have under torch.autocast("cpu"), bit for bit: results, dtypes and the gradients
of inputs; those of weights as with a cast for each use, `cache_enabled=False`, which are summed in float32 (R21)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import hmp
from oracle import BF16, F32, tensors

pytestmark = pytest.mark.native_kernels

LENGTHS = torch.tensor([5, 3, 2])
BATCH, INPUT, HIDDEN = 3, 4, 6
EVERY = 97  # of the default run, one in so many; it divides no number of choices


class Config(NamedTuple):
    kind: str
    bidirectional: bool
    batch_first: bool
    layers: int
    packed: bool
    projected: bool
    bias: bool
    training: bool
    grad: bool
    input: torch.dtype
    state: torch.dtype | None

    @property
    def cell(self) -> bool:
        return "Cell" in self.kind


def layers() -> Iterator[Config]:
    kinds, flags, dtypes = ("LSTM", "GRU", "RNN", "RNN relu"), (False, True), (F32, BF16)
    for found in itertools.product(kinds, flags, flags, (1, 2), flags, flags, flags, flags, flags, dtypes, (None, *dtypes)):
        config = Config(*found)
        if not config.projected or config.kind == "LSTM":
            yield config


def cells() -> Iterator[Config]:
    for kind, bias, grad, dtype, state in itertools.product(
        ("LSTMCell", "GRUCell", "RNNCell", "RNNCell relu"), (False, True), (False, True), (F32, BF16), (None, F32, BF16)
    ):
        yield Config(kind, False, False, 1, False, False, bias, True, grad, dtype, state)


ALL = [*layers(), *cells()]


def made(config: Config) -> torch.nn.Module:
    torch.default_generator.manual_seed(0)
    kind, _, nonlinearity = config.kind.partition(" ")
    options: dict[str, Any] = {"bias": config.bias}
    if nonlinearity:
        options["nonlinearity"] = nonlinearity
    if not config.cell:
        options |= {"bidirectional": config.bidirectional, "batch_first": config.batch_first, "num_layers": config.layers}
        options |= {"dropout": 0.3 if config.layers > 1 else 0.0}
        options |= {"proj_size": 3} if config.projected else {}
    return getattr(torch.nn, kind)(INPUT, HIDDEN, **options).train(config.training)


def given(config: Config) -> tuple[Any, list[torch.Tensor]]:
    """The input, and the first states: none, one, or two for an LSTM."""
    torch.default_generator.manual_seed(1)
    if config.cell:
        x: Any = torch.randn(BATCH, INPUT)
        shapes = [(BATCH, HIDDEN)] * 2
    else:
        x = torch.randn(BATCH, 5, INPUT) if config.batch_first else torch.randn(5, BATCH, INPUT)
        depth = config.layers * (1 + config.bidirectional)
        shapes = [(depth, BATCH, 3 if config.projected else HIDDEN), (depth, BATCH, HIDDEN)]
    x = x.to(config.input)
    if config.packed:
        x = pack_padded_sequence(x, LENGTHS, batch_first=config.batch_first)
    count = 0 if config.state is None else 2 if config.kind.startswith("LSTM") else 1
    return x, [torch.randn(shape).to(config.state) for shape in shapes[:count]]


def run(config: Config, region: AbstractContextManager[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Results and gradients: of the input, of the states, of the parameters."""
    module, (x, state) = made(config), given(config)
    data = (x.data if config.packed else x).requires_grad_(config.grad)
    x = x._replace(data=data) if config.packed else data
    state = [t.requires_grad_(config.grad) for t in state]
    torch.default_generator.manual_seed(2)  # dropout
    with torch.set_grad_enabled(config.grad):
        with region:
            found = module(x, *((tuple(state),) if len(state) == 2 else state))
        results = [t for part in found for t in _data(part)] if isinstance(found, tuple) else [found]
        if not config.grad:
            return results, []
        loss = torch.stack([r.float().square().sum() for r in results]).sum()
        return results, list(torch.autograd.grad(loss, [data, *state, *module.parameters()], allow_unused=True))


def _data(part: Any) -> list[torch.Tensor]:
    return [part.data] if isinstance(part, PackedSequence) else list(tensors([part]))


def runs_with_onednn(config: Config) -> bool:
    """oneDNN has not every LSTM for every processor: where torch.autocast itself raises, torch's own kernels are compared."""
    try:
        run(config, torch.autocast("cpu", dtype=BF16))
    except RuntimeError as error:
        assert "could not create a primitive" in str(error), error
        return False
    return True


def differing(configs: list[Config]) -> list[str]:
    found = []
    for config in configs:
        with torch.backends.mkldnn.flags(enabled=runs_with_onednn(config)):
            found += differing_in(config)
    return found


def differing_in(config: Config) -> list[str]:
    found = []
    results, once = run(config, torch.autocast("cpu", dtype=BF16))
    _, each = run(config, torch.autocast("cpu", dtype=BF16, cache_enabled=False))
    got = run(config, hmp.casts("torch-cpu"))
    inputs = len(once) - len(list(made(config).parameters())) if once else 0
    # oneDNN gives the gradients of an LSTM's weights in float32, which torch.autocast rounds and hmp does not
    alike = _near if config.kind == "LSTM" else _same
    for what, ours, theirs, check in (
        ("results", got[0], results, _same),
        ("gradients of inputs", got[1][:inputs], once[:inputs], _same),
        ("gradients of weights", got[1][inputs:], each[inputs:], alike),
    ):
        if len(ours) != len(theirs) or not all(map(check, ours, theirs)):
            found.append(f"{what} of {config}")
    return found


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else one.dtype is other.dtype and torch.equal(one, other)


def _near(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype is other.dtype and bool((one - other).norm() <= 2 * torch.finfo(BF16).eps * other.norm())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN relu", "LSTMCell", "GRUCell", "RNNCell"])
def test_one_configuration_in_many_has_autocasts_bits(kind: str) -> None:
    configs = [config for config in ALL if config.kind == kind]
    chosen = configs[:: EVERY if len(configs) > 100 else 5]
    assert len(chosen) >= 5
    differ = differing(chosen)
    assert not differ, "\n".join(differ)


@pytest.mark.parametrize(
    "part", [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(at, marks=pytest.mark.nightly) for at in range(1, 8))]
)
def test_every_configuration_has_autocasts_bits(part: int) -> None:
    differ = differing(ALL[part::8])
    assert len(ALL) > 3900
    assert not differ, f"{len(differ)} differ:\n" + "\n".join(differ[:20])


def test_r21_the_gradients_of_the_steps_of_one_call_meet_in_float32() -> None:
    config = Config("GRU", False, False, 1, False, False, True, True, True, F32, None)
    module = made(config)
    x = torch.randn(64, BATCH, INPUT)
    once, each = torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", dtype=BF16, cache_enabled=False)
    grads = []
    for region in (once, each, hmp.casts("torch-cpu")):
        with region:
            loss = module(x)[0].float().square().sum()
        grads.append(torch.autograd.grad(loss, list(module.parameters())))
    assert all(map(torch.equal, grads[2], grads[1]))
    assert not all(map(torch.equal, grads[2], grads[0]))
