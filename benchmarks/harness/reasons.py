"""Why a row of the targets table is where it is, where it misses its target: one line, by the words of the row."""

from __future__ import annotations

import re

# The first that is found in a row's words holds. docs/dev/performance-notes.md has the measurements.
_REASONS: tuple[tuple[str, str], ...] = (
    (r"^(LSTM|GRU)Cell", "a step's products are small: casts of its input and state, and the look-up of four copies, are Python"),
    (r"^a call", "a Python object stands for the function: its call takes 1.7 closures, the look at each dtype the rest"),
    (r"pure bfloat16", "each call casts float32 weights; cast_weights() casts them once"),
    (r"^bytes.*saved8|^training step, saved8|^step of .*saved8", "packing is arithmetic on each saved activation: it saves bytes"),
    (
        r"^training step|^narrow models, training|training, hmp / torch",
        "one or two Python frames a call, about 3 us a linear; casts by hand take 0.97 to 0.98",
    ),
    (r"^inference of a BERT", "the products take the time here, not the casts"),
    (r"inference", "the same frames in less time: torch.autocast casts each weight in C++ at each call, too"),
    (r"optimizer step|zero_grad", "one Python property or method for each parameter; optimizers with foreach=True 1.02 to 1.14"),
    (r"^weights used again.*time", "the gradient of each use is cast to float32 before it is summed (R21)"),
    (r"^import hmp", "50 modules of the core"),
    (r"over parameters", "the C library's heap, not a call"),
    (r"compile", "each cast is a node of Dynamo's graph"),
)


def reason(what: str) -> str:
    """Return why the row misses its target, "" if nobody has found out."""
    return next((said for words, said in _REASONS if re.search(words, what)), "")
