"""The opening of RESULTS.md: sentences for a user, each written by the part that measured it."""

from __future__ import annotations

from .stats import Estimate

# in this order; a part that was not run has "not measured in this run"
TOPICS = {
    "same lists": "Training step, torch.autocast's lists",
    "inference": "Inference, torch.autocast's lists",
    "pure": "Beside a model that is bfloat16 throughout, torch.autocast's lists",
    "memory": "Memory, torch.autocast's lists",
    "reused": "Weights used many times in a step, torch.autocast's lists",
}


def claim(ratio: Estimate, other: str) -> str:
    """Return a claim about a ratio of times to `other`'s: none of a difference within noise, or with unknown noise."""
    if not ratio.known:
        return f"{ratio.text()} of {other}'s time (too few rounds to know its noise)"
    if abs(ratio.value - 1) <= ratio.noise:
        return f"{other}'s time within noise ({ratio.text()})"
    change = 100 * (ratio.value - 1)
    return f"{abs(change):.1f} % {'more' if change > 0 else 'less'} time than {other} ({ratio.text()})"


def lines(sentences: dict[str, str]) -> list[str]:
    """Return the lines, from the parts' sentences by topic."""
    return [f"- **{title}**: {sentences.get(topic, 'not measured in this run.')}" for topic, title in TOPICS.items()]
