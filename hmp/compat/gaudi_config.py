"""Apply an Optimum Gaudi configuration on any device: the casts, the optimizer, the clip function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hmp

from .. import HmpError, Policy
from ..core.convert import Handle
from ..core.policy.folders import read_gaudi_config
from .habana.optimizers import FusedAdamW

__all__ = ["Applied", "apply"]

_FLAGS = ("use_habana_mixed_precision", "use_torch_autocast", "hmp_is_verbose", "use_fused_adam", "use_fused_clip_norm")


@dataclass(frozen=True)
class Applied:
    """The result of `apply()`, which unpacks as `optimizer_class, clip = apply(config, model)`.

    Attributes:
        optimizer: The class of the optimizer.
        clip: `clip(parameters=None, max_norm=1.0)` clips gradients in place and returns their norm before, a scalar tensor. None takes the
            model's parameters.
        handle: The handle of `hmp.convert()`, or None if the configuration asks for no mixed precision.
        config: All values of the configuration, also unknown keys; switches that it leaves out are False.

    Example:
        >>> applied = hmp.compat.gaudi_config.apply({"use_habana_mixed_precision": True}, torch.nn.Linear(4, 2))
        >>> hmp.is_converted()
        True
        >>> applied.revert()
    """

    optimizer: type[torch.optim.Optimizer]
    clip: Callable[..., torch.Tensor]
    handle: Handle | None
    config: Mapping[str, Any]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.optimizer, self.clip))

    def revert(self) -> None:
        """Restore the policy that was active before."""
        if self.handle is not None:
            self.handle.revert()


def apply(config: str | Path | Mapping[str, Any], model: torch.nn.Module) -> Applied:
    """Return the optimizer class and the clip function of a Gaudi configuration, and convert the process to its casts.

    Args:
        config: A gaudi_config.json, a folder with one, or its contents; `Policy.from_gaudi_config()` documents the keys.
            use_habana_mixed_precision or use_torch_autocast turn the casts on, use_fused_adam replaces torch.optim.AdamW by FusedAdamW,
            and use_fused_clip_norm asks for what torch.nn.utils.clip_grad_norm_ does anyway.
        model: The model that is trained.

    Returns:
        The optimizer class and the clip function, with the handle of the conversion.

    Raises:
        HmpError: `model` is not a torch.nn.Module, or the configuration cannot be used.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer_class, clip = hmp.compat.gaudi_config.apply({"use_fused_adam": True}, model)
        >>> optimizer_class.__name__
        'FusedAdamW'
    """
    if not isinstance(model, torch.nn.Module):
        raise HmpError(
            f"gaudi_config.apply() expected a torch.nn.Module as its second argument, got {type(model).__name__}; pass the model itself"
        )
    policy = Policy.from_gaudi_config(config)
    values: dict[str, Any] = dict.fromkeys(_FLAGS, False) | {**read_gaudi_config(config)[0]}
    casts = values["use_habana_mixed_precision"] or values["use_torch_autocast"]
    handle = hmp.convert(policy=policy, verbose=bool(values["hmp_is_verbose"]), model=model) if casts else None

    def clip(parameters: torch.Tensor | Iterable[torch.Tensor] | None = None, max_norm: float = 1.0) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters() if parameters is None else parameters, max_norm)

    return Applied(FusedAdamW if values["use_fused_adam"] else torch.optim.AdamW, clip, handle, values)
