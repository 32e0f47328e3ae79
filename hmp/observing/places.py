"""Where a call comes from: the module that is running, by its path in the model, and the line of the user's code."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .call_sites import caller


class Place(NamedTuple):
    """A place in the user's program: module path ("" outside every module), file and line of the nearest code that is not torch's or
    hmp's."""

    module: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.module or '(no module)'} at {self.file}:{self.line}"


class Modules:
    """Which module is running in each thread, told by hooks on all modules for the time of `watch()`; no model need be given.

    A path starts at the outermost module that is running: `encoder.layer.3.attention.self`, or the name of its class for that one.
    """

    def __init__(self) -> None:
        self._threads = threading.local()
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()

    @contextmanager
    def watch(self) -> Iterator[Modules]:
        """A stretch in which modules tell that they are called."""
        hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._enter),
            torch.nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def path(self) -> str:
        """The path of the innermost module that is running in this thread, "" for none."""
        stack = self._stack()
        return stack[-1][1] if stack else ""

    @property
    def root(self) -> torch.nn.Module | None:
        """The outermost module that is running in this thread."""
        stack = self._stack()
        return stack[0][0] if stack else None

    @property
    def innermost(self) -> torch.nn.Module | None:
        """The innermost module that is running in this thread."""
        stack = self._stack()
        return stack[-1][0] if stack else None

    def place(self) -> Place:
        """Where the calling code is."""
        return Place(self.path, *caller())

    def _stack(self) -> list[tuple[torch.nn.Module, str]]:
        found: list[tuple[torch.nn.Module, str]] | None = getattr(self._threads, "stack", None)
        if found is None:
            found = self._threads.stack = []
        return found

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        stack = self._stack()
        stack.append((module, self._path_in(stack[0][0] if stack else module, module, stack)))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        stack = self._stack()
        # a hook of the user's that raised before ours, or a module that was entered before the watch
        while stack:
            left, _ = stack.pop()
            if left is module:
                return

    def _path_in(self, root: torch.nn.Module, module: torch.nn.Module, stack: list[tuple[torch.nn.Module, str]]) -> str:
        if root is module:
            return type(module).__name__
        names = self._names.get(root)
        if names is None or id(module) not in names:
            names = self._names[root] = {id(each): name for name, each in root.named_modules()}
        # no child of the root: a module that its forward holds elsewhere
        return names.get(id(module)) or f"{stack[-1][1]}.{type(module).__name__}"
