"""`habana_frameworks.torch.hpex.normalization`: clipping of gradients, and the RMS norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["FusedClipNorm", "FusedRMSNorm", "fused_lamb_norm"]


class FusedClipNorm:
    """Clips gradients by their norm, as torch.nn.utils.clip_grad_norm_ does, on torch's foreach kernels."""

    def __init__(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> None:
        self.parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.max_norm = max_norm

    def clip_norm(self, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None) -> torch.Tensor:
        """Scales the parameters' gradients, in place, to a norm of at most `max_norm`; the norm that they had together."""
        return torch.nn.utils.clip_grad_norm_(self.parameters if parameters is None else parameters, float(self.max_norm))


class FusedRMSNorm:
    """`FusedRMSNorm.apply(x, weight, eps)` is torch.nn.functional.rms_norm over the last dimension, which a policy's lists name."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, eps: float, *kernels: Any) -> torch.Tensor:
        """The norm; what stands behind `eps` chooses among Gaudi's kernels."""
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


@torch.no_grad()
def fused_lamb_norm(grads: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """What LAMB divides all gradients by, as a tensor of one element: how many times `max_norm` their norm together is, at least 1."""
    norm = torch.nn.utils.get_total_norm([grad if grad.dtype == torch.float64 else grad.float() for grad in grads])
    return (norm / max_norm).clamp(min=1).reshape(1)
