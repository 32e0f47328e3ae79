"""`habana_frameworks.torch.hpex.kernels` and `.normalization`: attention, RMS norm and gradient clipping by torch's own ops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ... import HmpError

__all__ = ["FusedClipNorm", "FusedRMSNorm", "FusedSDPA", "fused_lamb_norm"]


class FusedSDPA:
    """Attention: torch.nn.functional.scaled_dot_product_attention, which policies list by that name.

    Example:
        >>> q = k = v = torch.ones(1, 2, 3, 4)  # batch, heads, tokens, head size
        >>> FusedSDPA.apply(q, k, v, None, 0.0, True).shape
        torch.Size([1, 2, 3, 4])
    """

    @staticmethod
    def apply(  # noqa: PLR0913
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute: bool | None = None,
        valid_sequence_lengths: torch.Tensor | None = None,
        seq_padding_type: str = "left",
        *others: Any,
    ) -> torch.Tensor:
        """Compute the attention.

        Args:
            query: Shape (..., L, E).
            key: Shape (..., S, E).
            value: Shape (..., S, Ev).
            attn_mask: Boolean, True where a key is attended to, or floating-point, added to the scores; broadcast to (..., L, S).
            dropout_p: The probability of dropout.
            is_causal: Mask the keys after each query.
            scale: The factor of the scores; None is `1 / sqrt(E)`.
            softmax_mode: Chooses among Gaudi's kernels; has no effect.
            recompute: Chooses among Gaudi's kernels; has no effect.
            valid_sequence_lengths: Must be None: torch takes a mask instead.
            seq_padding_type: Belongs to `valid_sequence_lengths`; has no effect.
            *others: Must be empty.

        Returns:
            Shape (..., L, Ev), in the dtype of the op.

        Raises:
            HmpError: `valid_sequence_lengths` or a later argument was given.
        """
        if valid_sequence_lengths is not None or others:
            raise HmpError(
                "FusedSDPA.apply(): expected no valid_sequence_lengths and no argument after seq_padding_type, which only Gaudi's kernel "
                "takes; pass a mask as attn_mask"
            )
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


class FusedRMSNorm:
    """RMS norm over the last dimension: torch.nn.functional.rms_norm, which policies list by that name.

    Example:
        >>> FusedRMSNorm.apply(torch.ones(2, 4), torch.ones(4), 1e-6).shape
        torch.Size([2, 4])
    """

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, eps: float, *kernels: Any) -> torch.Tensor:
        """Compute the norm.

        Args:
            x: Shape (..., E).
            weight: Shape (E,).
            eps: Added to the mean of the squares.
            *kernels: Choose among Gaudi's kernels; have no effect.

        Returns:
            Shape (..., E).
        """
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


class FusedClipNorm:
    """Clip gradients by their norm, as torch.nn.utils.clip_grad_norm_ does.

    Args:
        parameters: The parameters whose gradients are clipped.
        max_norm: The norm that all gradients have together at most.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> FusedClipNorm(model.parameters(), 1.0).clip_norm()
        tensor(3.1623)
    """

    def __init__(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> None:
        self.parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.max_norm = max_norm

    def clip_norm(self, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None) -> torch.Tensor:
        """Scale the gradients in place to a norm of at most `max_norm`.

        Args:
            parameters: Other parameters than those of the constructor.

        Returns:
            The norm of all gradients before they are scaled, a scalar tensor.
        """
        return torch.nn.utils.clip_grad_norm_(self.parameters if parameters is None else parameters, float(self.max_norm))


@torch.no_grad()
def fused_lamb_norm(grads: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Return what LAMB divides all gradients by, `max(1, norm / max_norm)` with their common norm: shape (1,), float32 or float64."""
    norm = torch.nn.utils.get_total_norm([grad if grad.dtype == torch.float64 else grad.float() for grad in grads])
    return (norm / max_norm).clamp(min=1).reshape(1)
