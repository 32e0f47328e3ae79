"""What a policy does to a language model's tokens: their log-probabilities and the distribution that they are drawn from.

Pure functions of logits under the policy, the float32 run's logits and the tokens. In float64, a few rows of the vocabulary at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .calling import own_loss

Tensor = torch.Tensor
LABELS = ("labels", "label", "targets", "target")
_CHUNK = 2**21  # logits in float64 at a time: 16 MiB for each of the few copies
_FITS = 1e-4  # a float32 mean of log-probabilities beside the same in float64


@dataclass(frozen=True)
class TokenDistance:
    """How far the log-probabilities of `tokens` tokens are from float32's, in nats.

    `of` says which tokens: the batch's labels, shifted by one where the model's loss is, or without any the ones that float32 holds
    likeliest. `logprob` and `reference` are their mean log-probabilities under the policy and in float32, `error_mean` and `error_max` the
    mean and the largest absolute difference, `bias` the mean difference. `kl_mean` and `kl_max` are of the KL divergence of the policy's
    distribution from float32's, KL(float32 || policy), at the positions of these tokens. A NaN under the policy counts as probability 0.
    """

    of: str
    tokens: int
    logprob: float
    reference: float
    error_mean: float
    error_max: float
    bias: float
    kl_mean: float
    kl_max: float

    def __str__(self) -> str:
        errors = f"off by {self.error_mean:.2g} on average, {self.error_max:.2g} at most, bias {self.bias:+.1g}"
        return f"{errors}; KL divergence {self.kl_mean:.2g}, {self.kl_max:.2g} at most (nats; {self.tokens} {self.of})"

    def metrics(self) -> dict[str, float]:
        """What a training loop logs."""
        return {
            "hmp/logprob_error_mean": self.error_mean,
            "hmp/logprob_error_max": self.error_max,
            "hmp/logprob_bias": self.bias,
            "hmp/kl": self.kl_mean,
        }


class Chosen(NamedTuple):
    """Tokens, for each position of the logits that has one, and where: a mask of the logits' shape without the vocabulary."""

    tokens: Tensor
    where: Tensor
    of: str


def distance_of_tokens(
    output: Any, given: Mapping[str, Any], loss: Tensor | None, reference: Callable[[Tensor], Tensor]
) -> TokenDistance | None:
    """The distance of the tokens of a model's output, None for one without logits. `given` are the arguments of its call, `loss` what was
    made of an output without a loss of its own, `reference(tensor)` is the float32 run's counterpart of a tensor."""
    logits = logits_of(output, given)
    if logits is None:
        return None
    own = own_loss(output)
    loss = loss if own is None else own
    chosen = choose(reference(logits), output, given, None if loss is None else float(reference(loss)))
    return token_distance(logits, reference(logits), chosen)


def logits_of(output: Any, given: Mapping[str, Any]) -> Tensor | None:
    """The logits in a model's output: what has that name, or a tensor with a vector for each of the labels in `given`."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    candidates = output if isinstance(output, (tuple, list)) and named is None else (output if named is None else named,)
    for each in candidates:
        if not isinstance(each, Tensor) or not each.is_floating_point() or each.dim() not in (2, 3) or each.shape[-1] < 2:
            continue
        labels = _labels(each, given)
        if labels is not None or (named is not None and not _has_targets_of_another_kind(given)):
            return each
    return None


def choose(reference: Tensor, output: Any, given: Mapping[str, Any], loss: float | None) -> Chosen:
    """The tokens whose log-probabilities count, for the float32 run's logits and loss, None where there is no loss.

    Labels stand one place before their logits in a causal model's loss, and beside them in others. Nothing in a batch says which: the
    loss, their mean negative log-probability, does.
    """
    labels = _labels(reference, given)
    everywhere = torch.ones(reference.shape[:-1], dtype=torch.bool, device=reference.device)
    mask = _mask(reference, output, given)
    if labels is not None:
        labels = labels.to(reference.device)
        found = Chosen(labels, labels >= 0, "labels")
        if labels.dim() == 1:
            return found._replace(of="labels of a class")
        fitting = found if loss is None else _fitting(reference, found, loss)
        if fitting is not None and mask is not None:
            # padding predicts nothing, and is not predicted
            fitting = fitting._replace(where=fitting.where & mask & (mask if fitting is found else mask.roll(-1, 1)))
        if fitting is not None:
            return fitting
    of = "tokens that float32 holds likeliest"
    of += ": the loss is not the mean of the labels' log-probabilities, shifted or not" if labels is not None else ""
    return Chosen(reference.argmax(-1), everywhere if mask is None else mask, of)


def token_distance(logits: Tensor, reference: Tensor, chosen: Chosen) -> TokenDistance | None:
    """The distance of the chosen tokens' log-probabilities, None where no token was chosen."""
    got, wanted, divergences = [], [], []
    for low, exact, token in _rows(chosen, logits, reference):
        under, without = low.log_softmax(-1), exact.log_softmax(-1)
        under = under.masked_fill(under.isnan(), -math.inf)
        terms = without.exp() * (without - under)
        divergences.append(terms.masked_fill(without == -math.inf, 0.0).sum(-1).clamp(min=0.0))
        got.append(under.gather(-1, token[:, None])[:, 0])
        wanted.append(without.gather(-1, token[:, None])[:, 0])
    if not got:
        return None
    under, without, divergence = torch.cat(got), torch.cat(wanted), torch.cat(divergences)
    difference = (under - without).masked_fill(under == without, 0.0)  # -inf in both
    return TokenDistance(
        of=chosen.of,
        tokens=len(under),
        logprob=float(under.mean()),
        reference=float(without.mean()),
        error_mean=float(difference.abs().mean()),
        error_max=float(difference.abs().max()),
        bias=float(difference.mean()),
        kl_mean=float(divergence.mean()),
        kl_max=float(divergence.max()),
    )


def _labels(logits: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    """The labels that give each vector of the logits a token."""
    for name in LABELS:
        found = given.get(name)
        if isinstance(found, Tensor) and found.dtype in (torch.int64, torch.int32) and found.shape == logits.shape[:-1]:
            # a vector with an element for none of them is an embedding, say
            return found.long() if bool((found < logits.shape[-1]).all()) else None
    return None


def _has_targets_of_another_kind(given: Mapping[str, Any]) -> bool:
    """Whether the labels are real numbers: then no distribution over tokens is meant by the logits."""
    return any(isinstance(given.get(name), Tensor) and given[name].is_floating_point() for name in LABELS)


def _mask(logits: Tensor, output: Any, given: Mapping[str, Any]) -> Tensor | None:
    """Where the logits are not those of padding."""
    decodes = isinstance(output, Mapping) and "encoder_last_hidden_state" in output
    found = given.get("decoder_attention_mask" if decodes else "attention_mask")
    if isinstance(found, Tensor) and found.dim() == 2 and found.shape == logits.shape[:-1]:
        return found.to(logits.device) > 0
    return None


def _fitting(reference: Tensor, labels: Chosen, loss: float) -> Chosen | None:
    """The labels beside their logits or one place before, whichever the loss is the mean of; None for neither."""
    shifted = Chosen(labels.tokens.roll(-1, 1), labels.where.roll(-1, 1), "labels, shifted by one as in the model's loss")
    shifted.where[:, -1] = False

    def off(each: Chosen) -> float:
        own = [exact.log_softmax(-1).gather(-1, token[:, None]) for exact, token in _rows(each, reference)]
        return abs(float(torch.cat(own).mean()) + loss) if own else math.inf

    nearest, error = min(((each, off(each)) for each in (labels, shifted)), key=lambda pair: pair[1])
    return nearest if error <= _FITS * max(abs(loss), 1.0) else None


def _rows(chosen: Chosen, *logits: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rows at a time of each logits, in float64, and their tokens."""
    rows = chosen.where.flatten().nonzero()[:, 0]
    for part in rows.split(max(1, _CHUNK // logits[0].shape[-1])):
        if len(part):
            yield (*(each.flatten(0, -2)[part].double() for each in logits), chosen.tokens.flatten()[part])
