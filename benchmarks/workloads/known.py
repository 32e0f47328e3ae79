"""Differences between torch.autocast and hmp under the same lists that are known, with their reasons. Any other one fails a run."""

from __future__ import annotations

# How far two results may be apart, relative, where the ops are the same: sums in another order, a mask in another dtype.
TOLERANCE = 1e-2

_CAT = "torch's own cat brings its inputs to the widest dtype, so hmp casts none before it; torch.autocast does"
_FINITE = "finite values of the position bias that a mask is added to stay finite under hmp (R12); torch.autocast lets them become infinite"
_FOLD = "torch.autocast's kept copy of a weight asks for gradients under no_grad too, and linear then folds its batch: mm, not bmm"

# by model, and by the ATen op that is counted otherwise
KNOWN: dict[str, dict[str, str]] = {
    "vit": {"cat": _CAT},
    "t5": {"clamp": _FINITE, "isinf": _FINITE, "where": _FINITE},
    "lstm": {"mm": _FOLD, "bmm": _FOLD},
}
