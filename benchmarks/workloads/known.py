"""Known differences between torch.autocast and hmp with the same lists, and their reasons. Any other difference fails a run."""

from __future__ import annotations

# How far two results may be apart, relative, where the ops are the same: sums in another order, a mask in another dtype.
TOLERANCE = 1e-2

_CAT = "torch's own cat brings its inputs to the widest dtype, so hmp casts none before it; torch.autocast does"
_FINITE = "finite values of the position bias that a mask is added to stay finite under hmp (R12); torch.autocast lets them become infinite"
_FOLD = "torch.autocast's kept copy of a weight asks for gradients under no_grad too, and linear then folds its batch: mm, not bmm"

_LOSS = "on CUDA torch.autocast takes cross_entropy's log_softmax in low precision, hmp in float32"
_HALF = "on CUDA torch.autocast runs cuDNN's recurrent layers in float16 although its dtype is bfloat16; hmp in bfloat16"

# by model, and by the ATen op that is counted otherwise
_EVERYWHERE: dict[str, dict[str, str]] = {
    "vit": {"cat": _CAT},
    "t5": {"clamp": _FINITE, "isinf": _FINITE, "where": _FINITE},
    "lstm": {"mm": _FOLD, "bmm": _FOLD},
}
_ON_CUDA: dict[str, dict[str, str]] = {"lstm": {"_cudnn_rnn": _HALF, "set_": _HALF, "_cudnn_rnn_flatten_weight": _HALF}}


def known(model: str, device: str) -> dict[str, str]:
    """Return the reason of each known difference, by ATen op."""
    if device != "cuda":
        return _EVERYWHERE.get(model, {})
    return {"_log_softmax": _LOSS} | _EVERYWHERE.get(model, {}) | _ON_CUDA.get(model, {})
