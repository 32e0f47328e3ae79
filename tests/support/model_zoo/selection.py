"""Which models a test runs for: a few in the default command, every twelfth of the others in .ci/run, the rest in .ci/nightly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from . import MODELS
from .kit import Model

# What a policy means on the CPU; `torch-cpu` is what `autocast` chooses there.
POLICIES = ("habana", "bert", "torch-cpu")
# Small and unlike each other: an encoder, rotary positions, a mixture, an encoder-decoder, batch statistics, a state space.
QUICK = ("bert", "llama", "mixtral", "t5", "resnet", "mamba2")


def each(names: Iterable[str] = MODELS, *, policies: Sequence[Any] = (), quick: Iterable[str] = QUICK) -> list[Any]:
    """A parameter for each model, with one of the policies in turn, and nightly each quick model with each of the others."""
    found = []
    for at, name in enumerate(names):
        marks = [] if name in quick else [pytest.mark.nightly if at % 12 else pytest.mark.slow]
        if not policies:
            found.append(pytest.param(MODELS[name], marks=marks, id=name))
        first = at % max(len(policies), 1)
        for number, policy in enumerate(policies):
            if number == first or name in quick:
                more = [] if number == first else [pytest.mark.nightly]
                found.append(pytest.param(MODELS[name], policy, marks=marks + more, id=f"{name}-{policy}"))
    return found


def is_late(model: Model) -> bool:
    """Whether the model is built after `convert()`: half of them are."""
    return list(MODELS).index(model.name) % 2 == 1
