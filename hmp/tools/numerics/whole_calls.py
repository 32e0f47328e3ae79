"""The call of a torch function that is in progress, whole: what it computes inside is its own affair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode

from ...core.active import current_state
from ...core.patching import unpatched_op
from ...core.policy import Policy
from ...core.torch_ops import name_of


@dataclass(frozen=True, eq=False)
class Called:
    """A call in progress: the op as lists spell it, and the policy in force, None where casts are off."""

    op: str
    policy: Policy | None


class WholeCalls(TorchFunctionMode):
    """The mode. `current` is the outermost call of an op in progress, None where there is none; `ended` hears of its result."""

    def __init__(self, ended: Callable[[Any], None]) -> None:
        super().__init__()
        self.current: Called | None = None
        self._ended = ended
        self._names: dict[Any, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function's own result."""
        func, kwargs = unpatched_op(func), kwargs or {}  # a wrapper has called it
        if self.current is not None:
            return func(*args, **kwargs)
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = name_of(func)
        if not name:
            return func(*args, **kwargs)
        self.current = Called(name, current_state().policy)
        try:
            result = func(*args, **kwargs)
        finally:
            self.current = None
        self._ended(result)
        return result
