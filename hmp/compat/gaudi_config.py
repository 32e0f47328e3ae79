"""What an Optimum Gaudi configuration asks for, on any device: the casts, the optimizer, the clip function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hmp

from .. import Handle, HmpError, Policy
from .habana.normalization import FusedClipNorm
from .habana.optimizers import FusedAdamW

__all__ = ["Applied", "apply"]

_FLAGS = ("use_habana_mixed_precision", "use_torch_autocast", "hmp_is_verbose", "use_fused_adam", "use_fused_clip_norm")


@dataclass(frozen=True)
class Applied:
    """What `apply()` gives: `optimizer_class, clip = apply(config, model)`.

    `optimizer` is a class of optimizers, `clip(parameters, max_norm)` clips gradients in place and returns their norm before that; without
    parameters it takes the model's. `handle` is what `hmp.convert()` gave, None for a configuration that asks for no mixed precision.
    `config` holds the configuration's values, keys that hmp does not know among them, and false for switches that it leaves out.
    """

    optimizer: type[torch.optim.Optimizer]
    clip: Callable[..., torch.Tensor]
    handle: Handle | None
    config: Mapping[str, Any]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.optimizer, self.clip))

    def revert(self) -> None:
        """Restores the policy that was in force before."""
        if self.handle is not None:
            self.handle.revert()


def apply(config: str | Path | Mapping[str, Any], model: torch.nn.Module) -> Applied:
    """The optimizer class and the clip function that the configuration asks for `model`; its casts are in force for the process.

    `config` is a gaudi_config.json, the folder that holds one, or its contents; Policy.from_gaudi_config() says what of it is read, and
    what is refused. It asks for casts by use_habana_mixed_precision or use_torch_autocast. `use_fused_adam` gives FusedAdamW in place of
    torch.optim.AdamW, `use_fused_clip_norm` FusedClipNorm in place of torch.nn.utils.clip_grad_norm_.
    """
    if not isinstance(model, torch.nn.Module):
        raise HmpError(f"apply() takes a configuration and a torch.nn.Module; {type(model).__name__} is none")
    policy = Policy.from_gaudi_config(config)
    values: dict[str, Any] = dict.fromkeys(_FLAGS, False) | _contents(config)
    casts = values["use_habana_mixed_precision"] or values["use_torch_autocast"]
    handle = hmp.convert(policy=policy, verbose=bool(values["hmp_is_verbose"]), model=model) if casts else None
    clip_norm = _fused_clip if values["use_fused_clip_norm"] else torch.nn.utils.clip_grad_norm_

    def clip(parameters: torch.Tensor | Iterable[torch.Tensor] | None = None, max_norm: float = 1.0) -> torch.Tensor:
        return clip_norm(model.parameters() if parameters is None else parameters, max_norm)

    return Applied(FusedAdamW if values["use_fused_adam"] else torch.optim.AdamW, clip, handle, values)


def _fused_clip(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return FusedClipNorm(clipped, max_norm).clip_norm(clipped)


def _contents(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    found: dict[str, Any] = json.loads((path / "gaudi_config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    return found
