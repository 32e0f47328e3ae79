"""An optimizer that stands for another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

_SHARED = ("defaults", "state", "param_groups")


def _shared(name: str) -> Any:
    def read(self: OptimizerWrapper) -> Any:
        return getattr(self.optim, name)

    def write(self: OptimizerWrapper, value: Any) -> None:
        setattr(self.optim, name, value)

    return property(read, write, doc="The optimizer's.")


def _registering(name: str) -> Any:
    def register(self: OptimizerWrapper, hook: Callable[..., Any], prepend: bool = False) -> Any:
        return getattr(self.optim, name)(lambda _, *rest: hook(self, *rest), prepend)

    register.__doc__ = "Registers the hook with the optimizer; it is called with this one."
    return register


class OptimizerWrapper(torch.optim.Optimizer):
    """Stands for `optim`: that one's are the state, the groups and the defaults, and what is written to them here is written there.

    A subclass has a `step`, whose hooks are its own. What else it has it adds to `__getstate__`, for copies and pickles. What torch asks of
    an optimizer by other names (whether its `step` unscales gradients) is not handed on: `step` may do it otherwise.
    """

    optim: torch.optim.Optimizer
    defaults = _shared("defaults")
    state = _shared("state")
    param_groups = _shared("param_groups")
    register_state_dict_pre_hook = _registering("register_state_dict_pre_hook")
    register_state_dict_post_hook = _registering("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _registering("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _registering("register_load_state_dict_post_hook")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__setstate__({"optim": optimizer})  # what torch's constructor makes, without groups of its own

    def __getstate__(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _SHARED}, "optim": self.optim}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name not in _SHARED})
        shared = {name: value for name, value in state.items() if name in _SHARED}
        if shared:
            self.optim.__setstate__(shared)

    def __copy__(self) -> OptimizerWrapper:
        copied = type(self).__new__(type(self))
        copied.__setstate__({**self.__getstate__(), "optim": copy.copy(self.optim)})
        return copied

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads it into the optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's, with its own defaults."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the group to the optimizer's."""
        self.optim.add_param_group(param_group)
