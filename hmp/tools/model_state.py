"""What a tool changes while it runs a model is put back: torch, the model, gradients and random numbers."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from ..core.active.regions import disable_casts, without_casts
from ..core.casting import has_values
from ..core.convert import patched_as_before
from ..core.torch_private import without_dispatch_modes, without_torch_function
from ..errors import HmpError
from .aten import local

Tensor = torch.Tensor
States: TypeAlias = list[tuple[Callable[[Any], Any], Any]]


@contextmanager
def preserve_state(
    model: torch.nn.Module, leaves: Iterable[Tensor] = (), written: Iterable[tuple[Tensor, Tensor]] | None = None
) -> Iterator[None]:
    """Make a context after which torch, the model and the random state are as before, and the gradients of `leaves`, which have none in it.

    What was `written`, each tensor with its values before, has them again; without it that is done for parameters and buffers.
    """
    leaves, tensors = list(leaves), [*model.parameters(), *model.buffers()]
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    if any(map(is_lazy, tensors)):
        raise HmpError(
            f"expected a model whose weights have shapes, got {type(model).__name__} with lazy modules; call it with a batch first"
        )
    written = changed_since(map(local, tensors)) if written is None else written
    modules = _Modules(model.modules())
    states = random_state((*tensors, *leaves))
    for leaf in leaves:
        leaf.grad = None
    with patched_as_before():
        try:
            yield
        finally:
            put_back(states)
            with untracked():
                modules.put_back()
                for tensor, values in written:
                    _write(tensor, values)
            for leaf, gradient in gradients:
                leaf.grad = gradient


def changed_since(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Return those of the tensors that have other values when this is gone through than they have now, with what they have now.

    Into what nobody wrote nothing is to be written, as the caller's graph may keep it, and into an expanded tensor torch writes nothing.
    What torch's own kernels cannot compare counts as written.
    """
    with untracked():
        before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    return ((tensor, values) for tensor, values in before if not is_equal(tensor, values))


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have one dtype and hold the same values, NaNs included; False where torch does not show them."""
    if one.dtype is not other.dtype or one.layout is not torch.strided or one.is_nested or not has_values(one):
        return False
    with suppress(RuntimeError):  # complex32, float4: torch has no kernel that compares them
        if torch.equal(one, other):
            return True
    # NaN is not equal to itself
    return one.shape == other.shape and torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def _write(tensor: Tensor, values: Tensor) -> None:
    if tensor.shape == values.shape:
        tensor.copy_(values)
    else:
        tensor.data = values.clone()


@contextmanager
def untracked() -> Iterator[None]:
    """Make a context whose ops do not count as the model's: no policy rounds their results, no recording and no mode sees them."""
    with disable_casts(), without_dispatch_modes(), without_torch_function(), torch.no_grad():
        yield


def default_device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    # without asking, a torch that was built for CUDA names it on machines without one
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


# --- random numbers ---


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
        where = {} if device.type == "mps" else {"device": device}  # of which there is only one
        found.append((partial(module.set_rng_state, **where), module.get_rng_state(**where)))
    return found


def put_back(states: States) -> None:
    """Set the generators to these states."""
    for put, state in states:
        put(state)


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


# --- modules and what trains them ---

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
        parameters = [parameter for module in modules for parameter in module.parameters()]
        self.given = bool(holders or reset)
        self.tensors = [*parameters, *(buffer for module in modules for buffer in module.buffers())]
        self._reset = reset
        self._modules = _Modules(owner for module in modules for owner in module.modules())
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in holders]
        self._buffers = [(each, each.detach().clone()) for module in modules for each in module.buffers()]  # those without a state, too
        self._gradients = [(each, None if each.grad is None else each.grad.detach().clone()) for each in parameters]

    @without_casts
    def restore(self) -> None:
        """Put everything back, and call the user's `reset`."""
        with torch.no_grad():
            self._modules.put_back()
            for holder, values in self._states:
                holder.load_state_dict(copy.deepcopy(values))  # a copy: optimizers go on working on the tensors that they are given
            for buffer, kept in self._buffers:
                if not is_equal(buffer, kept):
                    _write(buffer, kept)
            for parameter, gradient in self._gradients:
                if gradient is None or parameter.grad is None:
                    parameter.grad = None if gradient is None else gradient.clone()
                else:
                    parameter.grad.copy_(gradient)
        if self._reset is not None:
            self._reset()


def _has_state(candidate: Any) -> bool:
    return all(callable(getattr(candidate, name, None)) for name in ("state_dict", "load_state_dict"))


class _Modules:
    """What modules hold but for the values of their parameters and buffers.

    forward() may put another tensor in a buffer's place, register hooks, and count in attributes that aren't buffers.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        owners = list(modules)
        hooks = ("_buffers", "_hooks", "_hooks_with_kwargs", "_hooks_always_called")
        self._training = [(owner, owner.training) for owner in owners]  # a scripted module has it in no attribute
        self._trained = [(each, each.requires_grad) for owner in owners for each in owner.parameters(recurse=False)]
        self._attributes = [(owner, _plain(owner)) for owner in owners]
        self._containers = {
            id(table): (table, dict(table))
            for owner in owners
            for name, table in vars(owner).items()
            if name.endswith(hooks) and isinstance(table, dict)
        }
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        for value in (value for _, attributes in self._attributes for value in attributes.values()):
            self._keep(value)

    def _keep(self, value: Any) -> None:
        if isinstance(value, Tensor) and not value.is_inference():
            self._tensors[id(value)] = value, value.detach().clone()
        elif (type(value) in _CONTAINERS and id(value) not in self._containers) or type(value) is tuple:
            if type(value) is not tuple:
                self._containers[id(value)] = value, copy.copy(value)
            for each in value.values() if isinstance(value, dict) else value:
                self._keep(each)

    def put_back(self) -> None:
        """Put it back, under no_grad()."""
        for owner, training in self._training:
            owner.training = training
        for parameter, requires_grad in self._trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for owner, attributes in self._attributes:
            for name in _plain(owner).keys() - attributes.keys():
                del vars(owner)[name]
            vars(owner).update(attributes)
        for container, found in self._containers.values():
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(found)
        for tensor, values in self._tensors.values():
            if not is_equal(tensor, values):
                _write(tensor, values)


def _plain(owner: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that hold values, or lists and dicts of them; not what torch or hmp put there to be called."""
    return {
        name: value
        for name, value in vars(owner).items()
        if isinstance(value, _PLAIN) or (type(value) in _CONTAINERS and name not in _TABLES)
    }
