"""What optimizers begin with: arguments that cannot be right are refused, and a closure is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_AT_LEAST_0 = (lambda value: bool(value >= 0), "0 or more")
_FRACTION = (lambda value: bool(0 <= value < 1), "from 0 up to, and without, 1")
_FRACTIONS = (lambda value: all(0 <= each < 1 for each in value), _FRACTION[1])
_WANTED: dict[str, Any] = {"betas": _FRACTIONS, "decay": _FRACTION}


def checked(optimizer: str, **values: Any) -> None:
    """Nothing, or ValueError for the first value that is not what one of its name must be."""
    for name, value in values.items():
        is_right, wanted = _WANTED.get(name, _AT_LEAST_0)
        if not is_right(value):
            raise ValueError(f"{optimizer}: {name}={value!r} must be {wanted}")


def called(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step, called with gradients enabled, returned; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
