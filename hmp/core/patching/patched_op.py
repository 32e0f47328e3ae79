"""PatchedOp: the object that replaces one of torch's builtins under all its names."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any


class PatchedOp:
    """Replaces one function of torch, and equals and hashes as that function (R19), so that tables keyed by either find both.

    Args:
        original: torch's function.
        call: What a call of this object calls.
        module: The name of the module in which users find the function.
        path: Its name there, "matmul" or "Tensor.mul"; pickle finds it again by these two.
    """

    def __init__(self, original: Any, call: Callable[..., Any], module: str, path: str) -> None:
        self.original = self.__wrapped__ = original
        self.call = call
        self._found_at = module, path
        for name in ("__module__", "__doc__"):  # which it would have of its class
            setattr(self, name, getattr(original, name, None))
        for name in ("__name__", "__qualname__", "__self__", "__objclass__", "__text_signature__"):
            if hasattr(original, name):
                setattr(self, name, getattr(original, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __eq__(self, other: object) -> Any:
        return self.original == (other.original if isinstance(other, PatchedOp) else other)

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __reduce_ex__(self, protocol: Any) -> Any:
        module, path = self._found_at
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, sys.modules[module]) if owners else _Module(module)
        return getattr, (owner, name)

    def __copy__(self) -> PatchedOp:
        return self

    def __deepcopy__(self, memo: Any) -> PatchedOp:
        return self


_bound = types.MethodType


class PatchedMethod(PatchedOp):
    """A PatchedOp that replaces a method: read from an instance, it is bound to it."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _bound(self, instance)


class _Module:
    """Pickles as the module of that name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return importlib.import_module, (self._name,)


def unpatched_op(function: Any) -> Any:
    """Return torch's own function for a PatchedOp, and any other object as it is."""
    return function.original if isinstance(function, PatchedOp) else function
