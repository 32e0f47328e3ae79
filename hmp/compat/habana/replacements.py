"""The attributes of torch that the shim replaces, and how they are restored, the last one first."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ...core.patching.patched_op import INSIDE

_MISSING = object()


class AttributeReplacements:
    """Replaced attributes, and other changes to undo."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` until `undo()`."""
        # from the owner's own __dict__: an inherited attribute is restored by deleting
        old = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self._on_undo_where(owner, name, value, lambda: old)

    def put_around(self, owner: Any, name: str, function: Any) -> None:
        """Set `owner.name` to `function` until `undo()`, outside of hmp's own patches, also of later ones: it calls its `hmp_inside`."""
        if name in vars(owner):
            setattr(function, INSIDE, vars(owner)[name])
        function.hmp_outermost = function
        setattr(owner, name, function)
        self._on_undo_where(owner, name, function, lambda: vars(function).get(INSIDE, _MISSING))

    def _on_undo_where(self, owner: Any, name: str, value: Any, old: Callable[[], Any]) -> None:
        """Have `undo()` set `owner.name` to what `old()` returns, unless it is no longer `value` then."""

        def undo() -> None:
            if vars(owner).get(name, _MISSING) is value:
                before = old()
                if before is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
                return
            where = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
            warnings.warn(
                f"{where} was patched by another library after hmp.compat.habana; that patch stays, and hmp's function underneath is now "
                "inactive: it maps no device. Undo patches in reverse order",
                RuntimeWarning,
                stacklevel=5,
            )

        self.on_undo(undo)

    def on_undo(self, undo: Callable[[], Any]) -> None:
        """Have `undo()` call `undo`."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Restore everything. A patch of another library on top stays, with a warning."""
        while self._undo:
            self._undo.pop()()


# those of the shim
IN_PLACE = AttributeReplacements()
