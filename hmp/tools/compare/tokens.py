"""What a policy does to a language model's tokens: their log-probabilities and the distribution that they are drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
_CHUNK = 2**21  # logits in float64 at a time: 16 MiB for each of the few copies


@dataclass(frozen=True)
class TokenDistance:
    """How far the log-probabilities of `tokens` tokens are from float32's, in nats.

    `of` says which tokens: the batch's labels, or without any the tokens that float32 holds likeliest. `reference` is their mean
    log-probability in float32: minus the model's own loss, unless the labels are one place off. `error_mean` and `error_max` are the mean
    and the largest absolute difference, `kl_mean` and `kl_max` those of KL(float32 || policy) at the positions of these tokens. A NaN
    under the policy counts as probability 0.
    """

    of: str
    tokens: int
    reference: float
    error_mean: float
    error_max: float
    kl_mean: float
    kl_max: float

    def __str__(self) -> str:
        errors = f"error {self.error_mean:.2g} on average, {self.error_max:.2g} at most"
        of = f"{self.tokens} {self.of}, in float32 {self.reference:.4g} on average"
        return f"{errors}; KL divergence {self.kl_mean:.2g}, {self.kl_max:.2g} at most (nats; {of})"


def distance_of_tokens(
    output: Any, given: Mapping[str, Any], reference: Callable[[Tensor], Tensor], shift: bool = False
) -> TokenDistance | None:
    """Return the distance of the tokens of a model's output, None for one without logits of the shape (batch, positions, vocabulary).

    Args:
        output: What the model returned.
        given: The arguments of its call, by name.
        reference: Gives the float32 run's counterpart of a tensor.
        shift: Whether the logits at one place are of the label at the next one.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() != 3:
        return None
    tokens: Any = given.get("labels")
    exact, of = reference(logits), "labels"
    fits = isinstance(tokens, Tensor) and tokens.shape == logits.shape[:-1] and not tokens.is_floating_point()
    if not fits or bool((tokens >= logits.shape[-1]).any()):
        tokens, of = exact.argmax(-1), "likeliest tokens"
    tokens = tokens.long().to(logits.device)
    where, mask = tokens >= 0, _mask(logits, output, given)
    where = where if mask is None else where & mask
    if shift and of == "labels":
        # padding predicts nothing, and is not predicted
        where = where[:, 1:] if mask is None else where[:, 1:] & mask[:, :-1]
        logits, exact, tokens, of = logits[:, :-1], exact[:, :-1], tokens[:, 1:], "labels (shifted by one position)"
    return token_distance(logits, exact, tokens, where, of)


def token_distance(logits: Tensor, reference: Tensor, tokens: Tensor, where: Tensor, of: str) -> TokenDistance | None:
    """Return the distance of the log-probabilities of the `tokens` that are `where` the mask is True, None where it is nowhere."""
    errors, exact, divergences = [], [], []
    rows = where.flatten().nonzero()[:, 0]
    for part in rows.split(max(1, _CHUNK // logits.shape[-1])) if len(rows) else ():
        token = tokens.flatten()[part][:, None]
        low, wide = (each.flatten(0, -2)[part].double().log_softmax(-1) for each in (logits, reference))
        low = low.masked_fill(low.isnan(), -math.inf)
        terms = (wide.exp() * (wide - low)).masked_fill(wide == -math.inf, 0.0)
        divergences.append(terms.sum(-1).clamp(min=0.0))
        low, wide = low.gather(-1, token), wide.gather(-1, token)
        errors.append((low - wide).masked_fill(low == wide, 0.0).abs())  # -inf in both
        exact.append(wide)
    if not errors:
        return None
    error, divergence = torch.cat(errors), torch.cat(divergences)
    numbers = torch.cat(exact).mean(), error.mean(), error.max(), divergence.mean(), divergence.max()
    return TokenDistance(of, len(error), *map(float, numbers))


def _mask(logits: Tensor, output: Any, given: Mapping[str, Any]) -> Tensor | None:
    """Return where the logits are not those of padding."""
    decodes = isinstance(output, Mapping) and "encoder_last_hidden_state" in output
    found = given.get("decoder_attention_mask" if decodes else "attention_mask")
    if isinstance(found, Tensor) and found.dim() == 2 and found.shape == logits.shape[:-1]:
        return found.to(logits.device) > 0
    return None
