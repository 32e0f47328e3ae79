"""The functions that stand at torch's places: each asks what is in force here, and calls that, or torch's own op.

A switch is made once and keeps its identity; what it does where the process's policy is in force is its code, exchanged when that policy
changes. See switch_code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import state
from .signatures import Signature
from .state import Casts
from .switch_code import NAMES, NO_LOOK, PLAIN, Look, maker


def make(key: Any, op: Callable[..., Any], signature: Signature | None) -> Any:
    """A switch for torch's function `key`, which calls `op` until it is told of a policy."""
    switch = maker(None, PLAIN)(key, op, op)  # one code for all, because compiling one for each takes time
    _made.setdefault(key, []).append((switch, signature))
    return switch


def focus(casts: Casts) -> None:
    """Makes every switch quick where `casts` are in force: the process's, or a region's while the process has none."""
    global _focus
    _focus = casts
    NAMES["FOCUS"] = NAMES  # nobody's casts: until all know of the new ones, whoever is in their region looks their table up
    for key in _made:
        tell(key, casts.table.get(key), casts.looks.get(key, NO_LOOK))
    NAMES["FOCUS"] = casts


def keys() -> list[Any]:
    """torch's functions that switches were made for."""
    return list(_made)


def renew() -> None:
    """Tells switches that are new of the casts that the others are made for."""
    focus(_focus)


def is_focused() -> bool:
    """Whether the switches are made for casts that are in force anywhere."""
    return _focus.policy is not None


def tell(key: Any, cast: Any, look: Look) -> None:
    """Has the switches for `key` call `cast` under the casts that they are made for, or torch's own op for None."""
    if cast is None:
        look = PLAIN
    elif getattr(cast, "failed", None):
        look = NO_LOOK
    for switch, signature in _made[key]:
        call, _, op = switch.__closure__  # in the order of their names: _cast, _key, _op
        call.cell_contents = op.cell_contents if cast is None else cast
        made = maker(None if cast is None else signature, look, _focus is not state.PROCESS)(None, None, None)
        if made.__defaults__ is not None:  # the code of any call, `*args, **kwargs`, takes no notice of them
            switch.__defaults__, switch.__kwdefaults__ = made.__defaults__, made.__kwdefaults__
        # last: until here the old code casts by the new rule, which is as right
        switch.__code__ = made.__code__


def forget() -> None:
    """No switch stands anywhere any more."""
    _made.clear()


_focus = state.PROCESS
# torch's function → its switches, with the signature that they were made for. torch.mm and torch._VF.mm are two objects that are equal.
_made: dict[Any, list[tuple[Any, Signature | None]]] = {}


def failed(key: Any, cast: Any, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What comes of a call that raised `error` with nothing to cast (R11); the error where that is not a kernel's absence."""
    if not hasattr(cast, "again"):
        raise error
    result = cast.again(error, args, kwargs)
    if cast.failed and key in _made:
        tell(key, cast, NO_LOOK)  # from now on the wrapper asks what is remembered
    return result


NAMES["failed"] = failed  # generated code calls it
