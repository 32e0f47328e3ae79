"""`functools.partial` objects that took a builtin of torch before it was patched call what stands in its place."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import patches


def rebind(partials: Iterable[functools.partial[Any]], switches: Mapping[int, Callable[..., Any]]) -> None:
    """Has those of `partials` that call an original (its id → its switch) call the switch, until patches.restore().

    Models keep such partials from their construction on: transformers' FNet holds `partial(torch.fft.fftn, dim=(1, 2))`.
    """
    rebound: list[tuple[Any, Any]] = []
    for held in partials:
        original = held.func
        switch: Any = switches.get(id(original))
        if switch is not None and switch.__wrapped__ is original:
            make_call(held, switch)
            rebound.append((weakref.ref(held), switch))

    def undo() -> None:
        for reference, switch in rebound:
            held = reference()
            if held is not None and held.func is switch:
                make_call(held, switch.__wrapped__)

    patches.on_restore(undo)


def make_call(held: functools.partial[Any], function: Callable[..., Any]) -> None:
    """Has `held` call `function`, with the arguments that it has."""
    state: Any = held.__reduce__()[2]
    _, arguments, keywords, attributes = state
    held.__setstate__((function, arguments, keywords, attributes))  # type: ignore[attr-defined]
