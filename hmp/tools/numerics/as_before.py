"""A model is called, and buffers, gradients and random numbers are then as before."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch

from ...core.active import disable_casts
from ...core.casting import has_values
from ...core.torch_private import without_dispatch_modes, without_torch_function

Tensor = torch.Tensor
States: TypeAlias = list[tuple[Callable[[Any], Any], Any]]


@contextlib.contextmanager
def as_before(
    model: torch.nn.Module, leaves: Iterable[Tensor] = (), written: Iterable[tuple[Tensor, Tensor]] | None = None
) -> Iterator[None]:
    """A stretch after which the model's buffers, the gradients of `leaves`, which have none in it, and the random state are as before.

    What was `written`, each tensor with its values before, has them again; without it that is done for buffers."""
    leaves = list(leaves)
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    written = written_of(model.buffers()) if written is None else written
    states = random_state((*model.parameters(), *model.buffers(), *leaves))
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        put_back(states)
        for table, found in tables:
            table.clear()
            table.update(found)
        with aside():
            for tensor, values in written:
                tensor.copy_(values)
        for leaf, gradient in gradients:
            leaf.grad = gradient


def written_of(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of the tensors that have other values when this is gone through than they have now, with what they have now: into what nobody
    wrote nothing is to be written, as the caller's graph may keep it, and into an expanded tensor torch writes nothing. What torch's own
    kernels cannot compare counts as written."""
    with aside():
        before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    return ((tensor, values) for tensor, values in before if not _comparable(tensor) or not _equal(tensor, values))


def _equal(one: Tensor, other: Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except NotImplementedError:  # complex32, float4: torch compares no two of them
        return same_bytes(one, other)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of one shape and dtype hold the same bytes, NaNs included."""
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def _comparable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and has_values(tensor)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """A stretch whose ops are no part of the model's: no policy rounds their results, and no recording and no mode is told of them."""
    with disable_casts(), without_dispatch_modes(), without_torch_function(), torch.no_grad():
        yield


def random_state(tensors: Iterable[Tensor]) -> States:
    """Of each generator that ops on these tensors draw from, the function that sets it and its state; a device may have none."""
    found: States = [(torch.set_rng_state, torch.get_rng_state())]
    for device in {t.device for t in tensors if not t.is_cpu}:
        # torch has no module for XLA
        # on Gaudi: torch.hpu has get_rng_state(device) and set_rng_state(state, device).
        module: Any = sys.modules.get("torch_xla.core.xla_model") if device.type == "xla" else getattr(torch, device.type, None)
        if not hasattr(module, "get_rng_state"):
            continue
        where = () if device.type == "mps" else (device,)  # of which there is only one
        found.append((functools.partial(_set, module, where), module.get_rng_state(*where)))
    return found


def put_back(states: States) -> None:
    """The generators go on from there."""
    for put, state in states:
        put(state)


def _set(module: Any, where: tuple[torch.device, ...], state: Any) -> None:
    module.set_rng_state(state, *where)
