"""What the shim put in torch's places, and how it is taken away again, last first."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

from ...core import outermost
from ...core.outermost import MISSING


class Replacements:
    """Attributes that were replaced and other things to undo."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name` until `undo()`."""
        # from the owner's own __dict__: what was inherited is deleted again, not set
        old = vars(owner).get(name, MISSING)
        setattr(owner, name, value)

        def put_back() -> None:
            if old is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

        self._on_undo_where(owner, name, value, put_back)

    def put_around(self, owner: Any, name: str, function: types.FunctionType) -> None:
        """Sets `owner.name` to `function`, outside of all that hmp has there or puts there meanwhile, until `undo()`: see outermost.py."""
        outermost.put(owner, name, function)
        self._on_undo_where(owner, name, function, functools.partial(outermost.take_out, owner, name))

    def _on_undo_where(self, owner: Any, name: str, value: Any, put_back: Callable[[], None]) -> None:
        """Has `put_back` called by `undo()`, unless something else than `value` stands at `owner.name` then."""

        def undo() -> None:
            if vars(owner).get(name, MISSING) is value:
                put_back()
                return
            where = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
            warnings.warn(
                f"{where} was patched by somebody else on top of hmp.compat.habana; that patch is left standing, and the "
                "function below it maps no device any more. Undo patches in the reverse order of their making",
                RuntimeWarning,
                stacklevel=5,
            )

        self.on_undo(undo)

    def on_undo(self, undo: Callable[[], Any]) -> None:
        """Has `undo` called by `undo()`."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Puts back everything that was replaced. What somebody else put on top stays, with a warning."""
        while self._undo:
            self._undo.pop()()


# the shim's own
IN_PLACE = Replacements()
