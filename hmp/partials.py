"""`functools.partial` objects that took a builtin of torch before it was patched call what stands in its place."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from . import in_flight, patches


def rebind(switches: Mapping[int, Callable[..., Any]]) -> None:
    """Has every partial of an original (its id → its switch) call the switch, until patches.restore().

    Models keep such partials from their construction on: transformers' FNet holds `partial(torch.fft.fftn, dim=(1, 2))`.
    """
    rebound = []
    for held in _all():
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


# The partials of the last search, and how often older objects had been collected before it.
_known: list[weakref.ref[functools.partial[Any]]] = []
_collected: tuple[int, ...] | None = None
_FEW = 50_000  # with more objects the search in C is the faster one


def _all() -> list[functools.partial[Any]]:
    """Every partial there is."""
    global _collected
    now = _collections()
    found = None
    # a list of all objects holds tuples too that another thread is making, which Python then refuses to finish
    if now is not None and now == _collected and in_flight.alone():
        # no object has grown old since the last search: those that are new are among the young ones
        young = [*gc.get_objects(0), *gc.get_objects(1)]
        if len(young) < _FEW:
            found = {id(p): p for p in [reference() for reference in _known] if p is not None}
            found.update((id(o), o) for o in young if type(o) is functools.partial)
    if found is None or _collections() != now:
        # every partial refers to its class: a loop in C over all objects, which a loop in Python over a million of them is not
        referrers = gc.get_referrers(functools.partial)
        found = {id(o): o for o in referrers if type(o) is functools.partial}  # no isinstance(): it would ask a proxy for its class
        _collected = now
    _known[:] = map(weakref.ref, found.values())
    return list(found.values())


def _collections() -> tuple[int, ...] | None:
    """How often objects were moved to the oldest generation; None where this Python's collector may work otherwise."""
    return tuple(each["collections"] for each in gc.get_stats()[1:]) if sys.version_info < (3, 13) else None


def _make_call(held: functools.partial[Any], function: Callable[..., Any]) -> None:
    state: Any = held.__reduce__()[2]
    _, arguments, keywords, attributes = state
    held.__setstate__((function, arguments, keywords, attributes))  # type: ignore[attr-defined]
