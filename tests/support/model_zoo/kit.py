"""What a model of the zoo is, and how it is built, fed and trained, with hmp or without."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import hmp

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded: every model is built from a configuration

import transformers

from .sizes import small

transformers.logging.set_verbosity_error()

Batch = dict[str, Any]
Config = Any
Policy = str | hmp.Policy | None  # None: plain torch


@dataclass(frozen=True)
class Model:
    """One architecture: the class of transformers, what it is fed, and what its configuration has beside the small sizes."""

    name: str
    cls: str
    batch: Callable[[Config], Batch]
    config: Mapping[str, Any] = field(default_factory=dict)
    attention: str | None = None  # None is transformers' own choice: sdpa where the model has it
    parts: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)  # configurations inside the configuration
    # Of weights and batch. For mixtures one where rounding moves no token to another expert, which no cast could help.
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def available(self) -> bool:
        """Whether the installed transformers has it."""
        return all(map(is_there, (self.cls, *(cls for cls, _ in self.parts.values()))))


def is_there(cls: str) -> bool:
    """Whether the installed transformers has the class, and what the class's own module imports is installed too."""
    try:
        return hasattr(transformers, cls)
    except ImportError:
        return False


def make_config(model: Model, **changes: Any) -> Config:
    """The model's configuration, without dropout. Skips the test where there is no such model."""
    if not model.available:
        pytest.skip(f"this transformers has no {model.cls}")
    classes = {name: getattr(transformers, cls) for name, (cls, _) in model.parts.items()}
    parts = {name: cls(**small(cls) | model.parts[name][1]) for name, cls in classes.items()}
    config_class = getattr(transformers, model.cls).config_class
    sizes = small(config_class) if config_class.__name__ != "VisionEncoderDecoderConfig" else {}  # which is of its parts alone
    config = config_class(**{**sizes, **model.config, **parts, **changes})
    _no_dropout(config)
    if model.attention is not None:
        config._attn_implementation = model.attention
    return config


def _no_dropout(config: Config) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _no_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def seed_all(seed: int) -> None:
    """Seeds torch, and Python's and numpy's generators, from which some models draw masks and layers to skip."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def build(model: Model, **changes: Any) -> torch.nn.Module:
    """The model in training mode without dropout; its weights are random and always the same."""
    seed_all(model.seed)
    built: torch.nn.Module = getattr(transformers, model.cls)(make_config(model, **changes)).train()
    for module in built.modules():
        for name in ("p", "dropout", "layerdrop", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return built


def feed(model: Model, built: torch.nn.Module) -> Batch:
    """The model's batch, always the same."""
    seed_all(model.seed + 1)
    return model.batch(built.config)


def floats(value: Any) -> list[torch.Tensor]:
    """The floating tensors of an output, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for item in value for t in floats(item)] if isinstance(value, (list, tuple)) else []


def forward(built: torch.nn.Module, batch: Batch) -> Any:
    """The model's output; what it draws at random (Reformer's hashes, the patches that MAE hides) is always the same."""
    seed_all(2)
    return built(**batch)


@hmp.disable_casts
def loss_of(output: Any) -> torch.Tensor:
    """The loss that the model computed from its labels, or a random projection of its outputs where it has none."""
    loss: torch.Tensor | None = output.get("loss") if isinstance(output, Mapping) else None
    if loss is not None:
        return loss.sum()
    generator = torch.Generator().manual_seed(5)
    ends = [t for t in floats(output) if t.requires_grad]
    return torch.stack([(t.float() * torch.randn(t.shape, generator=generator)).mean() for t in ends]).sum()


def backward(built: torch.nn.Module, batch: Batch) -> tuple[float, Any]:
    """One forward and one backward pass; returns the loss and the output, the gradients stay on the model."""
    built.zero_grad(set_to_none=True)
    output = forward(built, batch)
    loss = loss_of(output)
    loss.backward()
    return loss.item(), output


def gradients(built: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A copy of every parameter's gradient."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in built.named_parameters()}


def state(built: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter and of every buffer, saved or not."""
    return {name: t.detach().clone() for name, t in (*built.named_parameters(), *built.named_buffers())}


def converted(policy: Policy) -> contextlib.AbstractContextManager[Any]:
    """hmp for the whole process, or plain torch."""
    return contextlib.nullcontext() if policy is None else hmp.convert(policy=policy)


@dataclass(frozen=True)
class Run:
    """What training for three steps left behind."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]  # of the first step
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    output_is_finite: bool


def train(model: Model, policy: Policy = None, *, late: bool = False, steps: int = 3) -> Run:
    """Trains the model with AdamW under `policy` for the whole process, as a script that calls `hmp.convert()` does.

    `late` builds it after the conversion, as half of all scripts do.
    """
    with contextlib.ExitStack() as stack:
        if late:
            stack.enter_context(converted(policy))
        built = build(model)
        batch = feed(model, built)
        if not late:
            stack.enter_context(converted(policy))
        before = state(built)
        optimizer = torch.optim.AdamW(built.parameters(), lr=1e-3)
        losses: list[float] = []
        first: dict[str, torch.Tensor | None] = {}
        for _ in range(steps):
            loss, output = backward(built, batch)
            losses.append(loss)
            first = first or gradients(built)
            optimizer.step()
        return Run(losses, first, before, state(built), all(bool(torch.isfinite(t).all()) for t in floats(output)))


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine of two tensors as vectors, in float64; where one is zero, 1 if both are and else 0."""
    a, b = a.detach().double().flatten(), b.detach().double().flatten()
    product = float(a.norm() * b.norm())
    return float(a @ b) / product if product else float(a.norm() == b.norm())
