"""Bytes of saved activations: under torch.autocast and hmp."""

from __future__ import annotations

from hmp.tools.saved_activations import saved_by

from ..harness.results import Found, Row
from ..harness.sides import Side, autocast, policy_of, under_hmp
from ..harness.stats import geometric_mean
from ..workloads import models
from ..workloads.models import Case

# attention models are held to it from this width on
ATTENTION_TARGET, FROM_WIDTH, NONE_ABOVE = 1.00, 128, 1.00
TITLE = "bytes saved for backward, hmp / torch.autocast"


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
    found.details = [f"{'model':15} {'autocast':>13} {'hmp':>13} {'hmp / autocast':>16}   bytes saved for backward"]
    ratios: dict[str, float] = {}
    for name in names:
        for size in sizes:
            case = models.build(name, size, device)
            theirs, ours = (saved_bytes(case, side) for side in (autocast(device), under_hmp(policy_of(device))))
            ratios[case.title] = ours / theirs
            found.samples[case.title] = {"autocast": theirs, "hmp": ours}
            found.details.append(f"{case.title:15} {theirs:13,} {ours:13,} {ours / theirs:16.3f}")
    wide, said = _attention_row(ratios)
    found.rows.append(wide)
    worst = max(ratios, key=ratios.__getitem__)
    said += f"of {len(ratios)} models and sizes none keeps more than {ratios[worst]:.3f} of torch.autocast's bytes for backward ({worst})"
    found.opening["memory"] = f"{said}. Bytes are counted and have no noise."
    found.rows.append(
        Row(f"{TITLE}: none above", f"≤ {NONE_ABOVE:.2f}", f"worst {ratios[worst]:.3f} ({worst})", ratios[worst] <= NONE_ABOVE)
    )
    return found


def _attention_row(ratios: dict[str, float]) -> tuple[Row, str]:
    """Return the row about wide attention models, and its sentence of the opening."""
    what, target = f"{TITLE}: attention models from d = {FROM_WIDTH} on", f"≤ {ATTENTION_TARGET}"
    wide = {title: ratio for title, ratio in ratios.items() if _is_wide_attention(*title.split())}
    if not wide:
        return Row(what, target, "no such model was measured", None), ""
    widest, mean = max(wide, key=wide.__getitem__), geometric_mean(list(wide.values()))
    worst = wide[widest]
    row = Row(what, target, f"worst {worst:.3f} ({widest}), geometric mean {mean:.3f}", worst <= ATTENTION_TARGET)
    return row, f"attention models from d = {FROM_WIDTH} on keep {mean:.3f} of them, {worst:.3f} at most ({widest}); "


def _is_wide_attention(name: str, size: str) -> bool:
    spec = models.MODELS[name]
    return spec.attention and spec.sizes[size]["width"] >= FROM_WIDTH
