"""`functools.partial` objects that took a builtin of torch before it was patched call what stands in its place."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from . import patches


def rebind(switches: Mapping[int, Callable[..., Any]]) -> None:
    """Has every partial of an original (its id → its switch) call the switch, until patches.restore().

    Models keep such partials from their construction on: transformers' FNet holds `partial(torch.fft.fftn, dim=(1, 2))`.
    """
    rebound = []
    # every partial refers to its class: a loop in C over all objects, which a loop in Python over a million of them is not
    for held in gc.get_referrers(functools.partial):
        if type(held) is not functools.partial:  # no isinstance(): it would ask a proxy for its class
            continue
        original = held.func
        switch = switches.get(id(original))
        if switch is not None and switch.__wrapped__ is original:  # type: ignore[attr-defined]
            _make_call(held, switch)
            rebound.append((weakref.ref(held), original))

    def undo() -> None:
        for reference, original in rebound:
            held = reference()
            if held is not None:
                _make_call(held, original)

    patches.on_restore(undo)


def _make_call(held: functools.partial[Any], function: Callable[..., Any]) -> None:
    state: Any = held.__reduce__()[2]
    _, arguments, keywords, attributes = state
    held.__setstate__((function, arguments, keywords, attributes))  # type: ignore[attr-defined]
