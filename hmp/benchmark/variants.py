"""What is compared: plain torch, torch.autocast and hmp policies, each as a region to run a step in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..convert import casts
from ..errors import HmpError, OpListError
from ..policy import Policy, as_policy

FLOAT32 = "float32"
AUTOCAST = "autocast"


@dataclass(frozen=True)
class Variant:
    """A row to be: `region()` is entered around every single step, `policy` is hmp's or None."""

    name: str
    description: str
    region: Callable[[], AbstractContextManager[Any]]
    policy: Policy | None = None


def variants(policies: Iterable[str | Path | Policy], device: torch.device) -> list[Variant]:
    """The variants of these names, folders and policies. HmpError for none, for one named twice and for one that there is not."""
    if isinstance(policies, (str, os.PathLike, Policy)):
        raise HmpError(f"policies={policies!r} is one policy; give a list, such as policies=['float32', {str(_name(policies))!r}]")
    found: dict[str, Variant] = {}
    for given in policies:
        variant = _variant(given, device)
        if variant.name in found:
            raise HmpError(
                f"policies names {variant.name!r} twice; take one of them out, or tell them apart: policy.replace(name='another name')"
            )
        found[variant.name] = variant
    if not found:
        raise HmpError("policies is empty; name at least one, such as 'float32', 'autocast' or 'habana'")
    return list(found.values())


def _variant(given: Any, device: torch.device) -> Variant:
    if given == FLOAT32:
        return Variant(FLOAT32, "torch without casts", nullcontext)
    if given == AUTOCAST:
        if not torch.amp.is_autocast_available(device.type):
            raise HmpError(f"torch.autocast does not know the device {device.type!r}; take 'autocast' out of policies, or give device=")
        low = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        # entered anew for each step: it keeps the casts of weights until it is left, also when the optimizer has changed the weights
        return Variant(AUTOCAST, f"torch.autocast({device.type!r}), {low}", lambda: torch.autocast(device.type))
    try:
        policy = as_policy(given)
    except OpListError as error:
        if error.path is None and isinstance(given, str):
            raise HmpError(f"{error}; 'float32' is torch without casts, 'autocast' is torch.autocast") from None
        raise
    region = casts(policy)
    return Variant(str(_name(given)), str(policy), lambda: region, policy)


def _name(given: str | Path | Policy) -> str | Path:
    return given.name if isinstance(given, Policy) else given
