"""Bytes that the forward pass keeps for the backward pass."""

from __future__ import annotations

from hmp.benchmark.memory import Saved

from ..harness.results import Found, Row
from ..harness.sides import Side, autocast, policy_of, under_hmp
from ..harness.stats import geometric_mean
from ..workloads import models
from ..workloads.models import Case

ATTENTION_TARGET, NONE_ABOVE = 0.93, 1.00


def saved_bytes(case: Case, side: Side) -> int:
    """What one forward pass with its loss keeps on `side`."""
    case.model.train()
    with side.visit():
        side.run(case.loss).backward()  # as in the middle of training: whatever is made once has been made
        case.model.zero_grad(set_to_none=True)
        return Saved([*case.model.parameters(), *case.model.buffers()]).measure(lambda: side.run(case.loss))


def run(names: list[str], sizes: list[str], device: str) -> Found:
    """The rows about bytes saved for backward."""
    found = Found("memory")
    found.details = [f"{'model':15} {'autocast':>13} {'hmp':>13} {'hmp / autocast':>16}   bytes saved for backward"]
    ratios: dict[str, float] = {}
    for name in names:
        for size in sizes:
            case = models.build(name, size, device)
            theirs, ours = (saved_bytes(case, side) for side in (autocast(device), under_hmp(policy_of(device))))
            ratios[case.title] = ours / theirs
            found.samples[case.title] = {"autocast": theirs, "hmp": ours}
            found.details.append(f"{case.title:15} {theirs:13,} {ours:13,} {ours / theirs:16.3f}")
    attention = {title: ratio for title, ratio in ratios.items() if models.MODELS[title.split()[0]].attention}
    title = "bytes saved for backward, hmp / autocast"
    if attention:
        worst = max(attention, key=attention.__getitem__)
        result = f"worst {attention[worst]:.3f} ({worst}), geometric mean {geometric_mean(list(attention.values())):.3f}"
        found.rows.append(Row(f"{title}: attention models", f"≤ {ATTENTION_TARGET}", result, attention[worst] <= ATTENTION_TARGET))
    worst = max(ratios, key=ratios.__getitem__)
    found.rows.append(
        Row(f"{title}: none above", f"≤ {NONE_ABOVE:.2f}", f"worst {ratios[worst]:.3f} ({worst})", ratios[worst] <= NONE_ABOVE)
    )
    return found
