"""What arrives at ATen, and what functions torch hands out."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Noting(TorchFunctionMode):
    """Notes each function that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Noted(torch.Tensor):
    """A tensor whose class notes each function that it is given."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Trace(TorchDispatchMode):
    """Notes each overload that is called, such as "aten.mm.dtype", and the dtypes and numbers among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        seen = [v.dtype if isinstance(v, torch.Tensor) else v for v in leaves if isinstance(v, (torch.Tensor, torch.dtype, int, float))]
        self.calls.append((str(func), seen))
        return func(*args, **(kwargs or {}))

    def of(self, *ops: str) -> list[list[Any]]:
        """What arrived at each call of these ops."""
        return [seen for name, seen in self.calls if name.split(".")[1] in ops]

    def products(self) -> list[str]:
        """The overloads that multiply matrices."""
        return [name for name, _ in self.calls if "mm" in name]
