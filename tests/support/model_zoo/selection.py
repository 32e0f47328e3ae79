"""Which models a test runs for: a few in the default command, one of twelve of the others in .ci/run, the rest in .ci/nightly."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from . import MODELS
from .kit import Model

# What a policy means on the CPU; `torch-cpu` is what `autocast` chooses there.
POLICIES = ("habana", "bert", "torch-cpu")
# Small and unlike each other: an encoder, rotary positions, a mixture, an encoder-decoder, batch statistics, a state space.
HOLDS_BUILTINS = ("fnet",)  # in a partial, made before convert(): torch.fft.fftn, which has no bfloat16
QUICK = ("bert", "llama", "mixtral", "t5", "resnet", "mamba2")


def each(names: Iterable[str] = MODELS, *, policies: Sequence[Any] = (), quick: Iterable[str] = QUICK) -> list[Any]:
    """A parameter for each model; with `policies`, for each quick model and policy. The others have one of them in turn."""
    found = []
    for at, name in enumerate(names):
        marks = [] if name in quick else [pytest.mark.nightly if zlib.crc32(name.encode()) % 12 else pytest.mark.slow]
        if name in HOLDS_BUILTINS:
            marks.append(pytest.mark.searches_references)
        if not MODELS[name].available:
            marks.append(pytest.mark.skip(reason=f"this transformers has no {MODELS[name].cls}"))
        in_turn = policies if name in quick else policies[at % max(len(policies), 1) :][:1]
        for policy in in_turn or (None,):
            values = (MODELS[name],) if policy is None else (MODELS[name], policy)
            found.append(pytest.param(*values, marks=marks, id=name if policy is None else f"{name}-{policy}"))
    return found


def is_late(model: Model) -> bool:
    """Whether the model is built after `convert()`: half of them are."""
    return list(MODELS).index(model.name) % 2 == 1
