"""What the shim put in torch's places, and how it is taken away again, last first."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Replacements:
    """Attributes that were replaced and other things to undo."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name` until `undo()`."""
        # from the owner's own __dict__: what was inherited is deleted again, not set
        old = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def put_back() -> None:
            if vars(owner).get(name, _MISSING) is not value:
                where = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
                warnings.warn(
                    f"{where} was patched by somebody else on top of hmp.compat.habana; that patch is left standing, and the "
                    "function below it maps no device any more. Undo patches in the reverse order of their making",
                    RuntimeWarning,
                    stacklevel=5,
                )
            elif old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

        self.on_undo(put_back)

    def on_undo(self, undo: Callable[[], Any]) -> None:
        """Has `undo` called by `undo()`."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Puts back everything that was replaced. What somebody else put on top stays, with a warning."""
        while self._undo:
            self._undo.pop()()


# the shim's own
IN_PLACE = Replacements()
