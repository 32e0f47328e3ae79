"""`habana_frameworks.torch.hpex.kernels`: attention by torch's op, which a policy's lists name."""

from __future__ import annotations

from typing import Any

import torch

from ... import HmpError

__all__ = ["FusedSDPA"]


class FusedSDPA:
    """`FusedSDPA.apply(q, k, v, mask, dropout_p, is_causal, scale)` is torch.nn.functional.scaled_dot_product_attention."""

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
        """The attention; `softmax_mode` and `recompute` choose among Gaudi's kernels. HmpError for lengths, which torch takes as a mask."""
        if valid_sequence_lengths is not None or others:
            raise HmpError("FusedSDPA.apply(): valid_sequence_lengths and what stands behind it are Gaudi's alone; give a mask")
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
