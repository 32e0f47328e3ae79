"""Where a call comes from: the path of the running nn.Module in its model, and the line of the user's code."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .call_sites import caller


class Place(NamedTuple):
    """A place in the user's program: the path of the running nn.Module ("" outside of all), and file and line of the nearest code that is
    neither torch's nor hmp's."""

    module: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.module or '(no module)'} at {self.file}:{self.line}"


class Modules:
    """Which nn.Module is running in each thread, known inside `watch()` for every module of the process, whatever its model.

    A path is relative to the outermost running module: `encoder.layer.3.attention.self`. The outermost one has the name of its class.
    """

    def __init__(self) -> None:
        self._threads = threading.local()
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()

    @contextmanager
    def watch(self) -> Iterator[Modules]:
        """A context manager with hooks on all modules, by which they report that they are called and that they return."""
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
        """The path of the innermost running module of this thread, "" for none."""
        stack = self._stack()
        return stack[-1][1] if stack else ""

    @property
    def root(self) -> torch.nn.Module | None:
        """The outermost running module of this thread, None for none."""
        stack = self._stack()
        return stack[0][0] if stack else None

    @property
    def innermost(self) -> torch.nn.Module | None:
        """The innermost running module of this thread, None for none."""
        stack = self._stack()
        return stack[-1][0] if stack else None

    @property
    def running(self) -> list[torch.nn.Module]:
        """The running modules of this thread, outermost first."""
        return [module for module, _ in self._stack()]

    def place(self) -> Place:
        """The place of the calling code."""
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
        # more than one where a user's hook raised before ours ran; none of it where the module was entered before watch()
        while stack:
            if stack.pop()[0] is module:
                return

    def _path_in(self, root: torch.nn.Module, module: torch.nn.Module, stack: list[tuple[torch.nn.Module, str]]) -> str:
        if root is module:
            return type(module).__name__
        names = self._names.get(root)
        if names is None or id(module) not in names:
            names = self._names[root] = {id(each): name for name, each in root.named_modules()}
        # the root does not contain the module: a forward called one that is held elsewhere
        return names.get(id(module)) or f"{stack[-1][1]}.{type(module).__name__}"
