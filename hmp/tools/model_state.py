"""A model is called, and buffers, gradients and random numbers are then as before."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from ..core.active.regions import disable_casts, without_casts
from ..core.casting import has_values
from ..core.torch_private import without_dispatch_modes, without_torch_function
from ..errors import HmpError

Tensor = torch.Tensor
States: TypeAlias = list[tuple[Callable[[Any], Any], Any]]


@contextlib.contextmanager
def preserve_state(
    model: torch.nn.Module, leaves: Iterable[Tensor] = (), written: Iterable[tuple[Tensor, Tensor]] | None = None
) -> Iterator[None]:
    """Make a context after which the model's buffers, the gradients of `leaves`, which have none in it, and the random state are as before.

    What was `written`, each tensor with its values before, has them again; without it that is done for buffers.
    """
    leaves = list(leaves)
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    written = changed_since(model.buffers()) if written is None else written
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
        with untracked():
            for tensor, values in written:
                tensor.copy_(values)
        for leaf, gradient in gradients:
            leaf.grad = gradient


def changed_since(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Return those of the tensors that have other values when this is gone through than they have now, with what they have now.

    Into what nobody wrote nothing is to be written, as the caller's graph may keep it, and into an expanded tensor torch writes nothing.
    What torch's own kernels cannot compare counts as written.
    """
    with untracked():
        before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    return ((tensor, values) for tensor, values in before if not _comparable(tensor) or not _equal(tensor, values))


def _equal(one: Tensor, other: Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except RuntimeError:  # complex32, float4: torch has no kernel that compares them
        return same_bytes(one, other)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of one shape and dtype hold the same bytes, NaNs included."""
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def _comparable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and has_values(tensor)


@contextlib.contextmanager
def untracked() -> Iterator[None]:
    """Make a context whose ops do not count as the model's: no policy rounds their results, no recording and no mode sees them."""
    with disable_casts(), without_dispatch_modes(), without_torch_function(), torch.no_grad():
        yield


def random_state(tensors: Iterable[Tensor]) -> States:
    """Return of each generator, of Python, numpy and the tensors' devices, the function that sets it and its state."""
    found: States = [(random.setstate, random.getstate()), (torch.set_rng_state, torch.get_rng_state())]
    numpy = sys.modules.get("numpy")
    if numpy:
        found.append((numpy.random.set_state, numpy.random.get_state()))
    for device in {t.device for t in tensors if not t.is_cpu}:
        # torch has no module for XLA
        # on Gaudi: torch.hpu has get_rng_state(device) and set_rng_state(state, device).
        module: Any = sys.modules.get("torch_xla.core.xla_model") if device.type == "xla" else getattr(torch, device.type, None)
        if not hasattr(module, "get_rng_state"):  # as of "meta"
            continue
        where = () if device.type == "mps" else (device,)  # of which there is only one
        found.append((functools.partial(_set, module, where), module.get_rng_state(*where)))
    return found


def put_back(states: States) -> None:
    """Set the generators to these states."""
    for put, state in states:
        put(state)


def _set(module: Any, where: tuple[torch.device, ...], state: Any) -> None:
    module.set_rng_state(state, *where)


_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, tuple, type(None))
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
_TABLES = frozenset(vars(torch.nn.Module()))  # parameters, submodules, hooks: torch's own


class Snapshot:
    """A copy of what the objects hold now; `restore()` puts it back into them."""

    @without_casts  # a policy around it may round copies
    def __init__(self, model: torch.nn.Module | None, optimizer: Any, state: Any, reset: Callable[[], object] | None) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise HmpError(f"model= expected a torch.nn.Module, got {type(model).__name__}; pass other objects as state=[...]")
        if reset is not None and not callable(reset):
            raise HmpError(f"reset= expected a function without arguments, got {type(reset).__name__}")
        others = [] if optimizer is None else [("optimizer=", optimizer)]
        others += [("state=", each) for each in (state if isinstance(state, Iterable) and not _has_state(state) else (state,))]
        for argument, each in others:
            if not _has_state(each):
                raise HmpError(
                    f"{argument} expected objects with state_dict() and load_state_dict(), got {type(each).__name__}; "
                    "restore it yourself, in a function that you pass as reset="
                )
        holders = [*([] if model is None else [model]), *(each for _, each in others)]
        modules = [each for each in holders if isinstance(each, torch.nn.Module)]
        self.given = bool(holders or reset)
        self.tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        self._reset = reset
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in holders]
        owners = [owner for module in modules for owner in module.modules()]
        self._training = [(owner, owner.training) for owner in owners]  # scripted modules do not have it among their attributes
        # forward() may put another tensor in a buffer's place, of another shape, or one where there was none; and hooks
        self._places = [(table, dict(table)) for owner in owners for table in (owner._buffers, *_hooks(owner))]
        self._buffers = [kept for module in modules for kept in _unsaved_buffers(module)]
        # a length that a buffer was made for, an average that isn't a buffer
        seen: set[int] = set()
        self._attributes = [(owner, {name: _kept(value, seen) for name, value in _plain(owner).items()}) for owner in owners]
        self._trained = [(parameter, parameter.requires_grad) for module in modules for parameter in module.parameters()]
        self._gradients = [
            (parameter, None if parameter.grad is None else parameter.grad.detach().clone())
            for module in modules
            for parameter in module.parameters()
        ]

    def restore(self) -> None:
        """Put everything back, and call the user's `reset`."""
        for owner, training in self._training:
            owner.training = training
        for table, places in self._places:
            table.clear()
            table.update(places)
        for holder, values in self._states:
            holder.load_state_dict(copy.deepcopy(values))  # a copy: optimizers go on working on the tensors that they are given
        with torch.no_grad(), disable_casts():
            for owner, name, buffer, values in self._buffers:
                try:
                    buffer.copy_(values)
                except RuntimeError:  # it was given another shape, or is an expanded one
                    owner._buffers[name] = values.clone()
            for owner, attributes in self._attributes:
                _put_back(owner, attributes)
            for parameter, requires_grad in self._trained:
                parameter.requires_grad_(requires_grad)
            for parameter, gradient in self._gradients:
                if gradient is None or parameter.grad is None:
                    parameter.grad = None if gradient is None else gradient.clone()
                else:
                    parameter.grad.copy_(gradient)
        if self._reset is not None:
            self._reset()


def _has_state(candidate: Any) -> bool:
    return all(callable(getattr(candidate, name, None)) for name in ("state_dict", "load_state_dict"))


def _unsaved_buffers(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]:
    """Owner, name, tensor and its copy, of each buffer that state_dict() leaves out."""
    for owner in module.modules():
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers.get(name)
            if buffer is not None:
                yield owner, name, buffer, buffer.detach().clone()


def _plain(owner: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that hold values, or lists and dicts of them; not what torch or hmp put there to be called."""
    found = {name: value for name, value in vars(owner).items() if isinstance(value, _PLAIN)}
    return found | {name: value for name, value in vars(owner).items() if type(value) in _CONTAINERS and name not in _TABLES}


def _hooks(owner: torch.nn.Module) -> list[dict[Any, Any]]:
    names = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
    return [value for name, value in vars(owner).items() if name.endswith(names) and isinstance(value, dict)]


class _Attribute(NamedTuple):
    """A value; of a tensor that can be written to its version and a copy, of a container what it holds."""

    value: Any
    version: int = 0
    copy: torch.Tensor | None = None
    holds: Any = None

    def put_back(self) -> Any:
        """Return the value, as it was."""
        value, holds = self.value, self.holds
        if self.copy is not None and value._version != self.version:
            value.copy_(self.copy)
        if isinstance(holds, dict):
            items = {key: each.put_back() for key, each in holds.items()}
            value.clear()
            value.update(items)
        elif isinstance(holds, list):
            elements = [each.put_back() for each in holds]
            if not isinstance(value, tuple):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(elements)
        return value


def _kept(value: Any, seen: set[int]) -> _Attribute:
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return _Attribute(value, value._version, value.detach().clone())
    if type(value) not in (*_CONTAINERS, tuple) or id(value) in seen:
        return _Attribute(value)
    seen.add(id(value))
    if isinstance(value, dict):
        return _Attribute(value, holds={key: _kept(each, seen) for key, each in value.items()})
    return _Attribute(value, holds=[_kept(each, seen) for each in value])


def _put_back(owner: torch.nn.Module, attributes: Mapping[str, _Attribute]) -> None:
    for name in _plain(owner).keys() - attributes.keys():
        del vars(owner)[name]
    for name, kept in attributes.items():
        vars(owner)[name] = kept.put_back()


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Make a context after which every random number generator is as it was."""
    states = random_state([torch.empty(0, device=device)])
    try:
        yield
    finally:
        put_back(states)


def seed_all(seed: int) -> None:
    """Seeds torch on every device, `random`, and numpy where it is in use."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)
