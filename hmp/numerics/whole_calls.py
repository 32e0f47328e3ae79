"""The call of a torch function that is in progress, whole: what it computes inside is its own affair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from ..ops import STRUCTURE


class WholeCalls(TorchFunctionMode):
    """The mode. `current` is the outermost call in progress, None where there is none; `ended` hears of its result."""

    def __init__(self, ended: Callable[[Any], None]) -> None:
        super().__init__()
        self.current: object = None
        self._ended = ended

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function's own result."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in STRUCTURE or self.current is not None:
            return func(*args, **kwargs)
        self.current = object()
        try:
            result = func(*args, **kwargs)
        finally:
            self.current = None
        self._ended(result)
        return result
