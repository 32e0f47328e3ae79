"""Bytes of saved activations: under torch.autocast, hmp, and hmp with casts of any size shared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import hmp
from hmp.tools.saved_activations import saved_by

from ..harness.results import Found, Row
from ..harness.sides import Side, autocast, policy_of, under_hmp
from ..harness.stats import geometric_mean
from ..workloads import models
from ..workloads.models import Case

# attention models are held to it from this width on
ATTENTION_TARGET, FROM_WIDTH, NONE_ABOVE = 0.94, 128, 1.00
TITLE = "bytes saved for backward, hmp / torch.autocast"


@contextlib.contextmanager
def sharing_all(device: str) -> Iterator[None]:
    """Return hmp with casts of any size shared between products, which saves the most memory and costs small models time."""
    hmp.set_sharing(0)
    try:
        with under_hmp(policy_of(device)).visit():
            yield
    finally:
        hmp.set_sharing(None)


def saved_bytes(case: Case, side: Side) -> int:
    """Return the bytes that one forward pass with its loss saves for backward on `side`."""
    case.model.train()
    with side.visit():
        side.run(case.loss).backward()  # as in the middle of training: whatever is made once has been made
        case.model.zero_grad(set_to_none=True)
        return saved_by(lambda: side.run(case.loss), [*case.model.parameters(), *case.model.buffers()])


def run(names: list[str], sizes: list[str], device: str) -> Found:
    """Return the rows about bytes saved for backward."""
    found = Found("memory")
    found.details = [
        f"{'model':15} {'autocast':>13} {'hmp':>13} {'sharing all':>13} {'hmp / autocast':>16} {'sharing all':>13}"
        "   bytes saved for backward"
    ]
    ratios: dict[str, float] = {}
    shared: dict[str, float] = {}
    all_shared = Side("hmp, sharing all", visit=lambda: sharing_all(device))
    for name in names:
        for size in sizes:
            case = models.build(name, size, device)
            sides = (autocast(device), under_hmp(policy_of(device)), all_shared)
            theirs, ours, least = (saved_bytes(case, side) for side in sides)
            ratios[case.title], shared[case.title] = ours / theirs, least / theirs
            found.samples[case.title] = {"autocast": theirs, "hmp": ours, "hmp, sharing all": least}
            found.details.append(f"{case.title:15} {theirs:13,} {ours:13,} {least:13,} {ours / theirs:16.3f} {least / theirs:13.3f}")
    found.rows, said = _attention_rows(ratios, shared)
    worst = max(ratios, key=ratios.__getitem__)
    said += f"of {len(ratios)} models and sizes none keeps more than {ratios[worst]:.3f} of torch.autocast's bytes for backward ({worst})"
    found.opening["memory"] = f"{said}. Bytes are counted and have no noise."
    found.rows.append(
        Row(f"{TITLE}: none above", f"≤ {NONE_ABOVE:.2f}", f"worst {ratios[worst]:.3f} ({worst})", ratios[worst] <= NONE_ABOVE)
    )
    return found


def _attention_rows(ratios: dict[str, float], shared: dict[str, float]) -> tuple[list[Row], str]:
    """Return the rows about wide attention models, by default and with all casts shared, and their sentence of the opening."""
    what, said = f"{TITLE}: attention models from d = {FROM_WIDTH} on", ""
    target = f"≤ {ATTENTION_TARGET}"
    rows = []
    for name, of in ((what, ratios), (f"{what}, hmp.set_sharing(0)", shared)):
        wide = {title: ratio for title, ratio in of.items() if _is_wide_attention(*title.split())}
        if not wide:
            return [Row(what, target, "no such model was measured", None)], ""
        widest, mean = max(wide, key=wide.__getitem__), geometric_mean(list(wide.values()))
        worst = wide[widest]
        rows.append(Row(name, target, f"worst {worst:.3f} ({widest}), geometric mean {mean:.3f}", worst <= ATTENTION_TARGET))
        said = said or f"attention models from d = {FROM_WIDTH} on keep {mean:.3f} of them, {worst:.3f} at most ({widest}); "
    return rows, said


def _is_wide_attention(name: str, size: str) -> bool:
    spec = models.MODELS[name]
    return spec.attention and spec.sizes[size]["width"] >= FROM_WIDTH
