"""PatchedOp: the object that replaces one of torch's functions under all its names."""

from __future__ import annotations

import pkgutil
import types
from collections.abc import Callable
from typing import Any


class PatchedOp:
    """Replaces one function of torch, in C or in Python, and passes for it.

    It equals and hashes as that function, so that tables keyed by either find both, has its attributes, and is an instance of its
    class to all but `type()`: `inspect.isfunction(F.softmax)` holds, and torch.jit compiles what it stands for.

    Args:
        original: torch's function.
        call: What a call of this object calls.
        module: The name of the module in which users find the function.
        path: Its name there, "matmul" or "Tensor.mul"; pickle finds it again by these two.
    """

    # functools.wraps copies what is in the `__dict__`
    __slots__ = ("__dict__", "__weakref__", "_found_at", "call", "original")

    def __init__(self, original: Any, call: Callable[..., Any], module: str, path: str) -> None:
        vars(self).update(getattr(original, "__dict__", {}))
        self.original = self.__wrapped__ = original
        self.call = call
        self._found_at = f"{module}:{path}"
        for name in ("__module__", "__doc__"):  # which it would have of its class
            setattr(self, name, getattr(original, name, None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op."""
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    @property  # type: ignore[misc]  # mypy has it writable
    def __class__(self) -> type:
        return type(self.original)

    def __eq__(self, other: object) -> Any:
        return self.original == unpatched_op(other)

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __reduce_ex__(self, protocol: Any) -> Any:
        pkgutil.resolve_name(self._found_at)  # raises here, not where the pickle is loaded
        return pkgutil.resolve_name, (self._found_at,)  # Python's own: a file may be loaded where hmp is not

    def __copy__(self) -> PatchedOp:
        return self

    def __deepcopy__(self, memo: Any) -> PatchedOp:
        return self


_bound = types.MethodType


class PatchedMethod(PatchedOp):
    """A PatchedOp that replaces a method or a Python function: read from an instance, it is bound to it."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _bound(self, instance)


# The attribute of an outermost function that has what is patched in its place; without one the function calls the one that it wraps.
INSIDE = "hmp_inside"


def is_outermost(function: Any) -> bool:
    """Return True for a function that says by `function.hmp_outermost = function` that patches of its place go inside of it.

    So it and a PatchedOp come and go in any order.
    """
    return type(function) is types.FunctionType and vars(function).get("hmp_outermost") is function  # a wrapper of it has its attributes


def unpatched_op(function: Any) -> Any:
    """Return torch's own function for a PatchedOp, also for one inside an outermost function, and any other object as it is."""
    if is_outermost(function):
        function = vars(function).get(INSIDE, function.__wrapped__)
    return function.original if isinstance(function, PatchedOp) else function
