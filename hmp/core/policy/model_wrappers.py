"""What trainers and libraries wrap around a model and its modules: DDP, FSDP, Fabric, DeepSpeed, torch.compile, checkpoints, PEFT."""

from __future__ import annotations

import torch

# What wrappers call the module that they wrap: DDP, DataParallel and DeepSpeed; torch.compile; Fabric; FSDP; checkpoint_wrapper.
_NAMES = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Of these, the ones that no module of the user's has.
UNMISTAKABLE = frozenset(name for name in _NAMES if name.startswith("_"))
# Whose they are: a module of the user's that has one child of such a name is no wrapper.
_LIBRARIES = frozenset(("torch", "lightning", "lightning_fabric", "pytorch_lightning", "deepspeed", "accelerate"))
# torch's classes whose children have the user's names.
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
# PeftModel, its tuner, and a layer with an adapter.
_NAMES_IN_PEFT = ("base_model", "model", "base_layer")


def wraps(module: torch.nn.Module, name: str) -> bool:
    """Return True if the child `name` is what the wrapper `module` wraps: its path in the model is then that of the wrapper."""
    if name == "_orig_mod":  # OptimizedModule sets `forward` on the object
        return True
    if name not in _NAMES and name not in _NAMES_IN_PEFT:
        return False
    library = str(type(module).forward.__module__).partition(".")[0]
    if library == "peft":
        return name in _NAMES_IN_PEFT
    return name in _NAMES and _is_wrapper(module) and not module._parameters


def _is_wrapper(module: torch.nn.Module) -> bool:
    library = str(type(module).forward.__module__).partition(".")[0]
    return library in _LIBRARIES and not isinstance(module, _CONTAINERS)


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
    if not _is_wrapper(module):
        return None
    return next(((name, inner) for name in _NAMES if (inner := module._modules.get(name)) is not None), None)
