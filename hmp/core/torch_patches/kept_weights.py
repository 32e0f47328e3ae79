"""Weights that `cast_weights(model, keep=...)` leaves in float32: `model.to(torch.bfloat16)`, `.half()` and `.bfloat16()` leave them, too.

Their names are in the model's AppliedPolicy, so they are kept as long as a policy is applied to it.
"""

from __future__ import annotations

import fnmatch
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..log import log, should_log
from ..patching import patches
from ..policy.scopes import plain_path
from . import module_calls

Tensor = torch.Tensor
_LOW = (torch.bfloat16, torch.float16)
_told: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # the models of which the log says so


def names_of(model: torch.nn.Module) -> dict[Tensor, list[str]]:
    """Return the parameters and buffers of a model, each with all of its names: that of a tied weight in each of its modules."""
    names: dict[Tensor, list[str]] = defaultdict(list)
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[tensor].append(name)
    return names


def matches(name: str, glob: str) -> bool:
    """Return True if the glob matches the weight's name, or the path of a module around it."""
    return any(fnmatch.fnmatchcase(path, glob) for path in paths_of(name))


def paths_of(name: str) -> Iterator[str]:
    """Yield the paths of the modules around a weight, and its name, without the parts that torch.compile, FSDP and checkpoints add."""
    parts = plain_path(name).split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def keep(model: torch.nn.Module, globs: tuple[str, ...]) -> None:
    """Have calls of `model.to(dtype)` leave the float32 weights whose names match, as long as a policy is applied to the model."""
    module_calls.keep(model, globs)
    follow(type(model), globs)


def follow(cls: Any, globs: tuple[str, ...]) -> None:
    """Patch the class of a model that leaves weights, if there are `globs`."""
    if globs:
        patches.rebind(cls, "_apply", _keeping(cls._apply))


def _keeping(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `_apply`, which `.to()` and `.half()` call, that leaves the float32 weights which the module's policy came with."""

    @functools.wraps(apply)
    def _apply(self: torch.nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        found = module_calls.applied(self)
        if found is None or not found.kept:
            return apply(self, fn, *args, **kwargs)
        globs = found.kept
        kept = ((tensor, name) for tensor, found in names_of(self).items() for name in found if any(matches(name, glob) for glob in globs))
        names = {id(tensor): name for tensor, name in kept}
        names |= {id(each.grad): names[id(each)] for each in self.parameters() if id(each) in names and each.grad is not None}

        def moved(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            if id(tensor) not in names or tensor.dtype is not torch.float32 or made.dtype not in _LOW:
                return made
            if self not in _told and should_log():
                log.warning(
                    "%s and other weights that cast_weights(keep=%s) names stay float32; hmp.remove(model) ends that",
                    names[id(tensor)],
                    list(globs),
                )
            _told.add(self)
            return tensor.to(made.device)

        return apply(self, moved, *args, **kwargs)

    return _apply
