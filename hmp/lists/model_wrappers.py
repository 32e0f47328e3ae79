"""The model inside what trainers wrap around it: DDP, FSDP, Fabric, DeepSpeed, torch.compile."""

from __future__ import annotations

import torch

# What wrappers call the module that they wrap: DDP, DataParallel and DeepSpeed; torch.compile; Fabric; FSDP.
_NAMES = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module")
# Whose they are: a module of the user's that has one child of such a name is no wrapper.
_LIBRARIES = frozenset(("torch", "lightning", "lightning_fabric", "pytorch_lightning", "deepspeed", "accelerate"))


def unwrapped(model: torch.nn.Module) -> tuple[str, torch.nn.Module]:
    """The module inside the wrappers around it, and its path in `model`, which are "" and `model` where there is no wrapper.

    A wrapper's `forward` is a library's, and it has neither parameters of its own nor children besides what it wraps.
    """
    chain = [("", model)]
    while (found := _inner(chain[-1][1])) is not None and all(found[1] is not module for _, module in chain):
        chain.append(found)
    inside = {id(module) for _, module in chain}
    stops = (i for i, (_, each) in enumerate(chain[:-1]) if each._parameters or any(id(c) not in inside for c in each.children()))
    chain = chain[: next(stops, len(chain)) + 1]
    return ".".join(name for name, _ in chain[1:]), chain[-1][1]


def _inner(module: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    if (type(module).forward.__module__ or "").partition(".")[0] not in _LIBRARIES:
        return None
    return next(((name, inner) for name in _NAMES if (inner := module._modules.get(name)) is not None), None)
