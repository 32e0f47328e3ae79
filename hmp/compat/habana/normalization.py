"""`habana_frameworks.torch.hpex.normalization`: clipping of gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["FusedClipNorm"]


class FusedClipNorm:
    """Clips gradients by their norm, as torch.nn.utils.clip_grad_norm_ does, on torch's foreach kernels."""

    def __init__(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> None:
        self.parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.max_norm = max_norm

    def clip_norm(self, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None) -> torch.Tensor:
        """Scales the parameters' gradients, in place, to a norm of at most `max_norm`; the norm that they had together."""
        return torch.nn.utils.clip_grad_norm_(self.parameters if parameters is None else parameters, float(self.max_norm))
