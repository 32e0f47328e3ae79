"""Dispatchers: the functions that stand in torch's places. Each asks which policy is in force, and calls its wrapper or torch's own op.

A dispatcher is made once and stays the same object. Its code is specialised for one policy, the process's as a rule, under which a call
costs least; under another one it looks its function up in that policy's replacements. When the process's policy changes, `__code__` is
exchanged. See dispatcher_code.
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
from .dispatcher_code import FIRST_CALL, NAMES, maker
from .fast_path import NO_FAST_PATH, PLAIN


def make(key: Any, op: Callable[..., Any], site: Site | None) -> Any:
    """A dispatcher for torch's function `key`, specialised as the others are. It calls `op`, the function without patches.

    `site` is a builtin's site, None for a Python function.
    """
    with _lock:
        dispatcher = maker(None, PLAIN, _is_regional())(key, op, op)
        if key in _specialised_for.replacements:
            dispatcher.__code__ = FIRST_CALL
        _made.setdefault(key, []).append((dispatcher, site))
    return dispatcher


def specialise_for(compiled: CompiledPolicy) -> None:
    """Specialises every dispatcher for `compiled`: the process's policy, or a region's while the process has none."""
    global _specialised_for
    with _lock:
        _specialised_for = compiled
        NAMES["SPECIALISED_FOR"] = NAMES  # no policy: until all dispatchers are specialised, each looks its function up in `replacements`
        plain = _plain()
        for key, dispatchers in _made.items():
            cast = compiled.replacements.get(key)
            for dispatcher, _ in dispatchers:
                if cast is None:
                    dispatcher.__closure__[0].cell_contents = dispatcher.__closure__[2].cell_contents
                # most ops are never called: the code for one is written at its first call
                dispatcher.__code__ = plain if cast is None else FIRST_CALL
        NAMES["SPECIALISED_FOR"] = compiled


def keys() -> list[Any]:
    """The functions of torch's that have dispatchers."""
    return list(_made)


def is_specialised() -> bool:
    """Whether the dispatchers are specialised for a policy that revert() has not put out of force."""
    return _specialised_for.policy is not None


def _plain() -> types.CodeType:
    code: types.CodeType = maker(None, PLAIN, _is_regional())(None, None, None).__code__
    return code


def _is_regional() -> bool:
    return _specialised_for is not state.PROCESS


def specialise(key: Any, op: Any) -> Any:
    """The dispatcher that calls `op`. Gives all dispatchers for `key` their code for the policy that `specialise_for()` was called with.

    Called at a dispatcher's first call, because it takes 0.5 ms."""
    with _lock:
        cast: Any = _specialised_for.replacements.get(key)
        found = op
        for dispatcher, site in _made.get(key, ()):
            call, _, own = dispatcher.__closure__  # in the order of their names: _cast, _key, _op
            if own.cell_contents is op:
                found = dispatcher
            if cast is None:
                dispatcher.__code__ = _plain()  # the policy has changed since the call began
                continue
            call.cell_contents = cast
            fast_path = NO_FAST_PATH if getattr(cast, "failed", None) else _specialised_for.fast_paths.get(key, NO_FAST_PATH)
            made = maker(None if site is None else signature_of(site), fast_path, _is_regional())(None, None, None)
            if made.__defaults__ is not None:  # the code of any call, `*args, **kwargs`, takes no notice of them
                dispatcher.__defaults__, dispatcher.__kwdefaults__ = made.__defaults__, made.__kwdefaults__
            # last: until here the old code calls the new wrapper, which is right too
            dispatcher.__code__ = made.__code__
            if site is not None and site.op in _READERS and made.__defaults__ is not None:
                write_marks.reads_only(made.__code__)
        return found


# Ops that write into no argument, and whose code no op that does shares, because it has their parameters' names.
_READERS = frozenset({
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
})  # fmt: skip


def forget() -> None:
    """Forgets all dispatchers. To be called when torch's own functions are in their places again."""
    with _lock:
        _made.clear()


_lock = fork_safe.RLock()
_specialised_for = state.PROCESS
# torch's function → its dispatchers, with the site that they were made for. torch.mm and torch._VF.mm are two objects that are equal.
_made: dict[Any, list[tuple[Any, Site | None]]] = {}


def failed(key: Any, cast: Any, error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result in float32 of a call with nothing to cast that raised `error` for want of a kernel (R11); GIVEN_UP for other errors."""
    if not hasattr(cast, "again"):
        return GIVEN_UP
    result = cast.again(error, args, kwargs)
    with _lock:
        if cast.failed and _specialised_for.replacements.get(key) is cast:
            specialise(key, key)  # from now on without a fast path: the wrapper remembers that it failed
    return result


NAMES.update(failed=failed, specialise=specialise, GIVEN_UP=GIVEN_UP)  # generated code calls them
