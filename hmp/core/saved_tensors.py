"""The tensors that autograd saves for backward: who gets them, and the check for writes that hooks would hide from torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from . import locks, torch_private
from .torch_private import can_be_disabled, saved_tensors_hooks

Tensor = torch.Tensor
Result = TypeVar("Result")

# torch's own, taken before anything is patched
_detach, _is_inference, _size = Tensor.detach, Tensor.is_inference, Tensor.size


def unseen(call: Callable[..., Result], *args: Any) -> Result:
    """Return `call(*args)`, of which no torch function mode sees a call."""
    if not torch_private.function_modes():
        return call(*args)
    with torch_private.without_torch_function():
        return call(*args)


def refuse_written(tensor: Tensor, version: int, op: str) -> None:
    """RuntimeError, as torch's own, where a tensor that an op saved for backward was written since it had that version."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{str(tensor.dtype).removeprefix('torch.')} {list(_size(tensor))}], which {op} saved for backward, is at version "
            f"{tensor._version}; expected version {version} instead. Hint: write into a copy of it, x.clone(), or after backward"
        )


class SavedExactly:
    """A tensor that is saved as it is."""

    __slots__ = ("_op", "_tensor", "_version")

    def __init__(self, tensor: Tensor, op: str) -> None:
        # of a leaf the object itself, whose memory may be exchanged until backward; an op's result would hold the op's node
        self._tensor = tensor if tensor.is_leaf else _detach(tensor)
        self._version = -1 if _is_inference(tensor) else tensor._version
        self._op = op

    def tensor(self) -> Tensor:
        """Return the tensor; raise RuntimeError if it was written since."""
        if self._version >= 0:
            refuse_written(self._tensor, self._version, self._op)
        return self._tensor


# --- watchers of ops that save tensors in a form of their own ---


watchers: list[Any] = []  # listeners with the methods `kept` and `changed`
About = list[tuple[Any, Any]]


def tell_kept(op: str, tensor: Tensor, nbytes: int | None) -> About:
    """Report to all watchers; return what `tell_changed` takes."""
    return [(watcher, watcher.kept(op, tensor, nbytes)) for watcher in watchers]


def tell_changed(about: About, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
    """Report to those that got the keeping."""
    for watcher, each in about:
        watcher.changed(each, saved, seconds, errors)


# --- counting of all other tensors that are saved ---


def _tensor_of(saved: SavedExactly) -> Tensor:
    """Return the unpack hook."""
    return unseen(saved.tensor)


class _Counting:
    """The pack hook of all that count in one thread."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Tensor], None]] = []

    def pack(self, tensor: Tensor) -> SavedExactly:
        """Report a tensor that is saved. Where hooks are, torch itself would not notice that it is written before backward."""
        with torch_private.without_torch_function():
            for keep in self.listeners:
                keep(tensor)
            return SavedExactly(tensor, "an op")


def innermost_counter() -> _Counting | None:
    """Return what counts in this thread; None if other hooks are inside of it, or torch does not say whose are active."""
    hooks = None if saved_tensors_hooks is None else saved_tensors_hooks(True)
    found = None if hooks is None else getattr(hooks[0], "__self__", None)
    return found if isinstance(found, _Counting) else None


@contextlib.contextmanager
def counting(keep: Callable[[Tensor], None]) -> Iterator[None]:
    """Make a context in which `keep` gets the tensors that this thread saves for backward, but for those in a form of an op's own."""
    with contextlib.ExitStack() as undo:
        counter = innermost_counter()  # torch calls the innermost hook alone
        if counter is None:
            counter = _Counting()
            undo.enter_context(_for_transforms)
            torch_private.push_saved_tensors_hooks(counter.pack, _tensor_of)
            undo.callback(torch_private.pop_saved_tensors_hooks)
        counter.listeners.append(keep)
        undo.callback(counter.listeners.remove, keep)
        yield


class _ForTransforms:
    """While entered, torch.func.grad() and the like disable hooks that count, where they refuse to run inside of others."""

    def __init__(self) -> None:
        self._lock = locks.RLock()
        self._entered = 0
        self._original: Callable[..., None] = getattr(*torch_private.DISABLE_HOOKS)

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1 and can_be_disabled:
                self._original = getattr(*torch_private.DISABLE_HOOKS)
                setattr(*torch_private.DISABLE_HOOKS, self._disable)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered and getattr(*torch_private.DISABLE_HOOKS) == self._disable:
                setattr(*torch_private.DISABLE_HOOKS, self._original)

    def _disable(self, message: str, fail_if_non_empty: bool = True) -> None:
        self._original(message, fail_if_non_empty and innermost_counter() is None)


_for_transforms = _ForTransforms()
