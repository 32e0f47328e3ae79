"""How a model is run for compare(), summary() and verify(): its call with a batch, and the policy that the run is under."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.active.state import current_state
from ..core.casting import dtype_name
from ..core.convert import casts
from ..core.policy.policy import DEFAULT, Policy, as_policy
from ..core.torch_patches.module_calls import applied_policy
from ..errors import HmpError


def call(model: torch.nn.Module, batch: Any) -> Any:
    """Return what the model returns for a batch.

    A mapping as keywords, a tuple or list as positional arguments, anything else as the only one.
    """
    args, kwargs = arguments(batch)
    return model(*args, **kwargs)


def arguments(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the positional and the keyword arguments that a batch is."""
    if isinstance(batch, Mapping):
        return (), batch
    return batch if isinstance(batch, (tuple, list)) else (batch,), {}


def named_arguments(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, those by position too, by the names that the module's forward has for them."""
    forward = getattr(module, "_orig_mod", module).forward
    try:
        found = inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # a forward in C, or a wrapper's
        return {**{str(at): each for at, each in enumerate(args)}, **kwargs}
    named: dict[str, Any] = {}
    for name, value in found.arguments.items():
        kind = found.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {str(at): each for at, each in enumerate(value)}
        else:
            named[name] = value
    return named


def compiled_in(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return what is compiled where the module is called.

    The one inside of what torch.compile(module) gave, or itself by module.compile().
    """
    inside: torch.nn.Module | None = vars(module).get("_modules", {}).get("_orig_mod")
    return module if inside is None and module._compiled_call_impl is not None else inside


def own_loss(output: Any) -> torch.Tensor | None:
    """Return the scalar that a model's output has as its loss."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def check_loss(value: Any, given: str) -> None:
    """Raise HmpError for anything but a real tensor with one element, of which backward can be called. `given` says where it comes from."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return
    found = f"{dtype_name(value.dtype)}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise HmpError(f"{given}: expected a real tensor with one element, got {found}; give loss=, such as lambda output: output.abs().mean()")


def check_module(model: Any, call: str, takes: str = "a torch.nn.Module and a batch") -> None:
    """Raise HmpError, which begins with the `call`, for anything but a module, and for a scripted one."""
    if not isinstance(model, torch.nn.Module):
        raise HmpError(f"{call}: expected {takes}, got {type(model).__name__}; pass the model itself")
    if isinstance(model, torch.jit.ScriptModule):
        raise HmpError(f"{call} can't see inside a scripted module; pass the module that it was scripted from")


def chosen_policy(model: torch.nn.Module, policy: Policy | str | Path | None) -> Policy:
    """Return the policy that was asked for, or without one what is applied to the model, else what is active here, else "autocast".

    HmpError where another one is asked for than what is applied, which the model's calls follow.
    """
    applied = applied_policy(model)
    if policy is None:
        return applied or current_state().user_policy or as_policy(DEFAULT, model)
    chosen = as_policy(policy, model)
    if applied is not None and applied != chosen:
        raise HmpError(f"policy {applied.name!r} is applied to the model and would override {chosen.name!r}; call hmp.remove(model) first")
    return chosen


def policy_context(model: torch.nn.Module, chosen: Policy, scopes: torch.nn.Module) -> Any:
    """Return what the run is in, with scoped entries for the modules of `scopes`.

    An applied model knows them itself, and the loss that is outside of it follows the others.
    """
    return casts(chosen.unscoped) if applied_policy(model) is not None else casts(chosen, model=scopes)
