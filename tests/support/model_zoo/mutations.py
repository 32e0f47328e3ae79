"""Damage that is done to a built model, and that the checks must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Mutation = Callable[[torch.nn.Module], Any]


def rotation_removed(built: torch.nn.Module) -> None:
    """No position is turned."""
    found = [module for module in built.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    assert found
    for module in found:
        module.register_forward_hook(lambda module, args, turns: (torch.ones_like(turns[0]), torch.zeros_like(turns[1])))


def parameter_detached(name: str) -> Mutation:
    """One parameter takes part in the computation, but not in backward."""

    def mutate(built: torch.nn.Module) -> None:
        owner, _, attribute = name.rpartition(".")
        module = built.get_submodule(owner)

        def enter(module: torch.nn.Module, args: Any) -> None:
            parameter = module._parameters.pop(attribute)
            object.__setattr__(module, "_kept", parameter)
            setattr(module, attribute, parameter.detach())

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            delattr(module, attribute)
            module._parameters[attribute] = module._kept

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    return mutate
