"""What is compared: plain torch, torch.autocast and hmp policies, each as what is put around samples and around steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.active import PROCESS, Region
from ...core.convert import convert
from ...core.policy import Policy, as_policy, device_preset, scopes
from ...errors import HmpError, OpListError

FLOAT32 = "float32"
AUTOCAST = "torch.autocast"


def default_names(device: torch.device) -> tuple[str, str, str]:
    """Plain torch, torch.autocast, and hmp with the lists of the same."""
    return FLOAT32, AUTOCAST, device_preset(device)


@dataclass(frozen=True)
class Variant:
    """A row to be, and makers of the two contexts."""

    name: str
    around_sample: Callable[[], AbstractContextManager[Any]] = nullcontext
    around_step: Callable[[], AbstractContextManager[Any]] = nullcontext


def variants(policies: Iterable[str | Path | Policy], device: torch.device, model: torch.nn.Module | None = None) -> list[Variant]:
    """Return the variants of these names, folders and policies. Raise HmpError for none, for one named twice and for one that there is not.

    `model` is the one whose modules scoped entries name.
    """
    if isinstance(policies, str) or not isinstance(policies, Iterable):
        such = str(_name(policies)) if isinstance(policies, (str, os.PathLike, Policy)) else AUTOCAST
        raise HmpError(f"policies= expected a list, got {policies!r}; give such as policies=['float32', {such!r}]")
    found: dict[str, Variant] = {}
    for given in policies:
        variant = _variant(given, device, model)
        if variant.name in found:
            raise HmpError(f"policies= has {variant.name!r} twice; remove one, or rename it: policy.replace(name='another name')")
        found[variant.name] = variant
    if not found:
        raise HmpError("policies= is empty; give at least one, such as 'float32', 'torch.autocast' or 'autocast'")
    return list(found.values())


def _variant(given: Any, device: torch.device, model: torch.nn.Module | None) -> Variant:
    if given == FLOAT32:
        return Variant(FLOAT32)
    if given == AUTOCAST:
        if not torch.amp.is_autocast_available(device.type):
            raise HmpError(
                f"torch.autocast does not support the device {device.type!r}; remove {AUTOCAST!r} from policies, or give device="
            )
        # entered anew for each step: it keeps the casts of weights until it is left, also when the optimizer has changed the weights
        return Variant(AUTOCAST, around_step=lambda: torch.autocast(device.type))
    try:
        policy = as_policy(given)
    except OpListError as error:
        if error.path is None and isinstance(given, str):
            raise HmpError(f"{error}; 'float32' is plain torch, 'torch.autocast' is PyTorch's own autocast") from None
        raise
    if policy.name in (FLOAT32, AUTOCAST) and given is policy:
        raise HmpError(
            f"policies= has a policy called {policy.name!r}, as a row of plain torch is; rename it: policy.replace(name='another name')"
        )
    if model is None:
        scopes.refuse_without_model(policy)
    elif policy.scoped:
        scopes.resolve(policy, model)  # whatever is wrong with its lines is said now
    return Variant(str(_name(given)), around_sample=lambda: policy_active(policy, model))


@contextmanager
def policy_active(policy: Policy, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Make a context with `policy` active, its scoped entries in `model`; it restores what hmp did before."""
    # convert() and not casts(): a handle takes the patches off again
    with convert(policy=policy, model=model), Region("benchmark()", lambda _: PROCESS):
        yield


def _name(given: str | Path | Policy) -> str | Path:
    return given.name if isinstance(given, Policy) else given
