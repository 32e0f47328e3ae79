"""Compiled models: code is compiled for each policy that is tried, more often than torch.compile allows for one function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..numerics.calling import compiled_in
from ..torch_private import dynamo

_MANY = 1_000_000


@contextmanager
def compiled_anew(model: torch.nn.Module) -> Iterator[None]:
    """A stretch in which a compiled model is compiled for each policy, and after which what it was compiled to is forgotten.

    Beyond torch's limit it would run uncompiled, in the search and for good: the time of a step would be that of another program.
    """
    imported = dynamo()
    if imported is None or all(compiled_in(module) is None for module in model.modules()):
        yield
        return
    names = ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit")
    config = imported.config
    limits = {name: _MANY for name in names if hasattr(config, name)}
    try:
        with config.patch(limits):
            yield
    finally:
        imported.reset()
