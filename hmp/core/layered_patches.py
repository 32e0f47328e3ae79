"""Functions that stay outermost in their places: what hmp puts there, before or after they came, goes inside of them.

A `torch.take` that takes indices of 32 bits and a PatchedOp instead of `torch.take` come and go in any order, and neither needs to
know of the other.
"""

from __future__ import annotations

import types
from typing import Any

MISSING: Any = object()


class _Place:
    """A place where `function` is outermost; `own` is what the owner has there without it, MISSING for what it inherits."""

    def __init__(self, function: types.FunctionType, own: Any) -> None:
        self.function = function
        self.own = own


# by the owner's id and the name
_places: dict[tuple[int, str], _Place] = {}


def put(owner: Any, name: str, function: types.FunctionType) -> None:
    """Set `owner.name` to `function`, which closes over `inside`, what is there, and calls it.

    One function may serve all places of that.
    """
    _places[id(owner), name] = _Place(function, vars(owner).get(name, MISSING))
    setattr(owner, name, function)


def take_out(owner: Any, name: str) -> None:
    """Set `owner.name` to what is inside the outermost function there."""
    own = _places.pop((id(owner), name)).own
    write(owner, name, own)


def inside(function: Any) -> Any:
    """Return what is inside `function` if that is outermost; any other value itself."""
    if type(function) is types.FunctionType and any(place.function is function for place in _places.values()):
        return _cell(function).cell_contents
    return function


def read(owner: Any, name: str) -> Any:
    """Return what `owner` itself has under that name, inside of what is outermost; MISSING for nothing."""
    own = vars(owner).get(name, MISSING)
    place = _places.get((id(owner), name))
    return own if place is None or own is not place.function else place.own


def write(owner: Any, name: str, value: Any) -> None:
    """Set `owner.name`, inside of what is outermost; MISSING deletes it."""
    place = _places.get((id(owner), name))
    if place is None or vars(owner).get(name) is not place.function:
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
        return
    place.own = value
    if value is MISSING:
        delattr(owner, name)
        value = getattr(owner, name)  # what the owner inherits
        setattr(owner, name, place.function)
    _cell(place.function).cell_contents = value


def _cell(function: types.FunctionType) -> types.CellType:
    cell: types.CellType = (function.__closure__ or ())[function.__code__.co_freevars.index("inside")]
    return cell
