"""The functions that stand at torch's places: each asks what is in force here, and calls that, or torch's own op.

A switch is made once and keeps its identity; what it does where the process's policy is in force is its code, exchanged when that policy
changes. See switch_code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from .. import fork_safe
from ..caches import write_marks
from ..context import CompiledPolicy, state
from ..ops import Site, signature_of
from ..wrapping import GIVEN_UP
from .switch_code import FIRST_CALL, NAMES, NO_FAST_PATH, PLAIN, maker


def make(key: Any, op: Callable[..., Any], site: Site | None) -> Any:
    """A switch for torch's function `key`, which calls `op` until it is told of a policy; `site` is where a builtin stands."""
    switch = maker(None, PLAIN)(key, op, op)
    with _lock:
        _made.setdefault(key, []).append((switch, site))
    return switch


def specialise_for(casts: CompiledPolicy) -> None:
    """Makes every switch quick where `casts` are in force: the process's, or a region's while the process has none."""
    global _specialised_for
    with _lock:
        _specialised_for = casts
        NAMES["FOCUS"] = NAMES  # nobody's casts: until all know of the new ones, whoever is in their region looks their table up
        plain = _plain()
        for key, switches in _made.items():
            cast = casts.table.get(key)
            for switch, _ in switches:
                if cast is None:
                    switch.__closure__[0].cell_contents = switch.__closure__[2].cell_contents
                # most ops are never called: the code for one is written at its first call
                switch.__code__ = plain if cast is None else FIRST_CALL
        NAMES["FOCUS"] = casts


def keys() -> list[Any]:
    """torch's functions that switches were made for."""
    return list(_made)


def respecialise() -> None:
    """Tells switches that are new of the casts that the others are made for."""
    specialise_for(_specialised_for)


def is_specialised() -> bool:
    """Whether the switches are made for casts that are in force anywhere."""
    return _specialised_for.policy is not None


def _plain() -> types.CodeType:
    code: types.CodeType = maker(None, PLAIN, _is_regional())(None, None, None).__code__
    return code


def _is_regional() -> bool:
    return _specialised_for is not state.PROCESS


def specialise(key: Any, op: Any) -> Any:
    """The switch that calls `op`; all switches for `key` now have the code for the casts in focus, which takes 0.5 ms to write."""
    with _lock:
        cast: Any = _specialised_for.table.get(key)
        if hasattr(cast, "made"):
            cast = cast.made()  # nobody has called it yet
        found = op
        for switch, site in _made.get(key, ()):
            call, _, held = switch.__closure__  # in the order of their names: _cast, _key, _op
            if held.cell_contents is op:
                found = switch
            if cast is None:
                switch.__code__ = _plain()  # another policy since the call began; all other code knows
                continue
            call.cell_contents = cast
            look = NO_FAST_PATH if getattr(cast, "failed", None) else _specialised_for.fast_paths.get(key, NO_FAST_PATH)
            made = maker(None if site is None else signature_of(site), look, _is_regional())(None, None, None)
            if made.__defaults__ is not None:  # the code of any call, `*args, **kwargs`, takes no notice of them
                switch.__defaults__, switch.__kwdefaults__ = made.__defaults__, made.__kwdefaults__
            # last: until here the old code casts by the new rule, which is as right
            switch.__code__ = made.__code__
            if site is not None and site.op in _READERS and made.__defaults__ is not None:
                write_marks.reads_only(made.__code__)
        return found


# Ops that write nothing, and whose code is that of no op that does: it has the names of their parameters.
_READERS = frozenset({
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
})  # fmt: skip


def forget() -> None:
    """No switch stands anywhere any more."""
    with _lock:
        _made.clear()


_lock = fork_safe.RLock()
_specialised_for = state.PROCESS
# torch's function → its switches, with the site that they were made for. torch.mm and torch._VF.mm are two objects that are equal.
_made: dict[Any, list[tuple[Any, Site | None]]] = {}


def failed(key: Any, cast: Any, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What comes of a call that raised `error` with nothing to cast (R11); GIVEN_UP where that is not a kernel's absence."""
    if not hasattr(cast, "again"):
        return GIVEN_UP
    result = cast.again(error, args, kwargs)
    with _lock:
        if cast.failed and _specialised_for.table.get(key) is cast:
            specialise(key, key)  # from now on the wrapper asks what is remembered
    return result


NAMES.update(failed=failed, specialise=specialise, GIVEN_UP=GIVEN_UP)  # generated code calls them
