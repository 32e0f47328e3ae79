"""Users' functions that are ops: those with one of hmp's decorators, and those that `hmp.register` was called for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from ..errors import HmpError
from . import casting, lists, observe
from .active import state
from .compiler_stance import untraced
from .ops.sites import NAMESPACES, Site, function_site, op_id, op_of
from .policy.entries import ListName, list_of
from .policy.names import can_be_listed
from .rules import registry
from .rules.op import OpUnderRule
from .rules.registry import op_wrap

P = ParamSpec("P")
R = TypeVar("R")

_registered: dict[tuple[int, str], tuple[Site, ListName]] = {}
_changes = 0


def registered() -> Iterator[tuple[Site, ListName]]:
    """Return the sites of registered functions, each with its list."""
    return iter(tuple(_registered.values()))


@untraced
def register(owner: Any, name: str, cast: ListName) -> None:
    """Put a function of your own on a list, under every policy: its inputs are cast, and ops inside it are not cast again.

    Args:
        owner: The module or class that has the function.
        name: The name of the function in `owner`.
        cast: The list: "bf16", "fp32" or "promote"; or the name of a dtype.

    Raises:
        HmpError: `owner` has no such function, hmp or torch owns it, or `cast` is not one of the lists.

    Example:
        >>> import types
        >>> mine = types.SimpleNamespace(scale=lambda x: x * 2)
        >>> hmp.register(mine, "scale", "bf16")
        >>> with hmp.casts("habana"):
        ...     mine.scale(torch.ones(2)).dtype
        torch.bfloat16
    """
    cast = list_of(cast, casting.LOW)
    if cast not in lists.for_functions():
        raise HmpError(f"register(): cast= expected one of {', '.join(map(repr, lists.for_functions()))}, got {cast!r}")
    where = getattr(owner, "__name__", type(owner).__name__)
    site = function_site(owner, name, where, f"{where}.{name}") if isinstance(name, str) else None
    if site is None:
        raise HmpError(
            f"register(): expected a function of {where}, got {name!r}; pass the module or class that has the function, and its name"
        )
    op = op_id(op_of(site.original) or "", "")
    if op or any(owner is namespace for _, namespace, _ in NAMESPACES):
        instead = f"put {op!r} on a list of the policy instead" if can_be_listed(op) else "register a function of your own that calls it"
        raise HmpError(f"register(): expected a function of your own, got torch's {where}.{name}; {instead}")
    global _changes
    _changes += 1
    _registered[(id(owner), name)] = (site, cast)
    observe.rebuild()


def changes() -> int:
    """Return how often a function was registered: code of torch.compile's is guarded on this number."""
    return _changes


def _decorated(function: Callable[P, R], cast: ListName) -> Callable[P, R]:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_decorated(function.__func__, cast))
    if inspect.isclass(function) or not callable(function):
        raise HmpError(f"@hmp.{cast}_function expected a function, got {function!r}; decorate a function or method")
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    op = UserOp(function, name, cast)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return call_op(op, *args, **kwargs)  # type: ignore[no-any-return]

    return wrapper


class UserOp:
    """A decorated function: one op on a list."""

    def __init__(self, function: Callable[..., Any], name: str, cast: ListName) -> None:
        self.function = function
        self._name = name
        self._cast = cast
        self._wrappers: dict[Any, Callable[..., Any]] = {}  # by the low-precision dtype

    def rule(self, low: Any) -> OpUnderRule:
        """Return the rule of the function under a policy with this low-precision dtype."""
        return registry.user_rule(self.function, self._name, self._cast, low)

    def wrapper(self, low: Any) -> Callable[..., Any]:
        """Return what is called instead of the function under a policy with this low-precision dtype."""
        if observe.listeners:
            return op_wrap(self.function, self.rule(low), observe.listeners)
        if low not in self._wrappers:
            self._wrappers[low] = op_wrap(self.function, self.rule(low))
        return self._wrappers[low]


def call_op(op: UserOp, /, *args: Any, **kwargs: Any) -> Any:
    """Call a decorated function under the active policy."""
    policy = state.current_policy()
    return (op.function if policy is None else op.wrapper(policy.dtype))(*args, **kwargs)


def bf16_function(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function one op on the BF16 list: while a policy is active, its inputs are cast to the low-precision dtype.

    Ops inside the function are not cast again.

    Args:
        function: The function, static method or class method to decorate.

    Returns:
        The decorated function.

    Raises:
        HmpError: `function` is a class, or cannot be called.

    Example:
        >>> @hmp.bf16_function
        ... def scale(x, y):
        ...     return x * y
        >>> with hmp.casts("habana"):
        ...     scale(torch.ones(2), torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """
    return _decorated(function, "bf16")


def fp32_function(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function one op on the FP32 list: while a policy is active, its inputs are cast to float32.

    Ops inside the function are not cast again.

    Args:
        function: The function, static method or class method to decorate.

    Returns:
        The decorated function.

    Raises:
        HmpError: `function` is a class, or cannot be called.

    Example:
        >>> @hmp.fp32_function
        ... def scale(x, y):
        ...     return x * y
        >>> with hmp.casts("habana"):
        ...     scale(torch.ones(2), torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return _decorated(function, "fp32")


def promote_function(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function one op on the promote list: while a policy is active, its inputs become the widest dtype among them.

    Ops inside the function are not cast again.

    Args:
        function: The function, static method or class method to decorate.

    Returns:
        The decorated function.

    Raises:
        HmpError: `function` is a class, or cannot be called.

    Example:
        >>> @hmp.promote_function
        ... def scale(x, y):
        ...     return x * y
        >>> with hmp.casts("habana"):
        ...     scale(torch.ones(2), torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return _decorated(function, "promote")
