"""torch's dispatcher, in private names that are read when they are asked for: what has kernels where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def dispatch_key(functionality: str, device: str) -> str:
    """Return the name of a dispatch key: "AutocastCUDA"."""
    return f"{functionality}{torch._C._dispatch_key_for_device(device)}"


OpOverload, OpOverloadPacket = torch._ops.OpOverload, torch._ops.OpOverloadPacket
_AUTOCAST_KEYS = tuple(name for name in dir(torch._C.DispatchKey) if name.startswith("Autocast") and name != "AutocastFunctionality")
_OF_TORCH = ("aten::", "prim::", "prims::")


def is_of_library(name: str) -> bool:
    """Return True for "torchvision::nms", False for an op of torch's own."""
    return not name.startswith(_OF_TORCH)


def has_autocast_kernel(op: Any, device: str = "") -> bool:
    """Return True if the overload, or one of the packet, has an autocast kernel of its own: for that type of device, or for any."""
    keys = (dispatch_key("Autocast", device),) if device else _AUTOCAST_KEYS
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in _names(op) for key in keys)


def _names(op: Any) -> list[str]:
    if isinstance(op, OpOverload):
        return [op.name()]
    name = op._qualified_op_name
    return [f"{name}.{overload}" if overload not in ("", "default") else name for overload in op.overloads()]


def name_of(op: Any) -> str:
    """Return "torchvision::nms" for the packet or one of its overloads."""
    name: str = op.name() if isinstance(op, OpOverload) else op._qualified_op_name
    return name


def library_ops() -> Iterator[Any]:
    """Yield the packets of libraries' ops with an autocast kernel of their own, and their overloads, that Python code has asked for."""
    names: set[str] = set()
    for key in _AUTOCAST_KEYS:
        names.update(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    for name in {name.partition(".")[0] for name in names if not name.startswith(_OF_TORCH)}:
        namespace, _, op = name.partition("::")
        packet = getattr(vars(torch.ops).get(namespace), "__dict__", {}).get(op)
        if isinstance(packet, OpOverloadPacket):
            yield packet
            yield from (each for each in list(vars(packet).values()) if isinstance(each, OpOverload))


class WithOwnHash:
    """A function that replaces the builtin of an op, by whose hash torch finds the op in its tables."""

    __slots__ = ("builtin", "function")

    def __init__(self, builtin: Callable[..., Any], function: Callable[..., Any]) -> None:
        self.builtin, self.function = builtin, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.builtin)

    def __eq__(self, other: object) -> bool:
        return self.builtin == getattr(other, "builtin", other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builtin, name)


def replace_builtin(op: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have calls of the packet or overload call what `make` returns for its builtin. torch.jit compiles them as before."""
    if not isinstance(op._op, WithOwnHash):
        new = WithOwnHash(op._op, make(op._op))
        torch.jit._builtins._get_builtin_table()[id(new)] = torch.jit._builtins._find_builtin(op._op)
        op._op = new


def restore_builtin(op: Any) -> None:
    """Undo `replace_builtin`."""
    if isinstance(op._op, WithOwnHash):
        torch.jit._builtins._get_builtin_table().pop(id(op._op), None)
        op._op = op._op.builtin
