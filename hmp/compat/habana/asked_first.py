"""Whether a program that imports a name can do without it."""

from __future__ import annotations

import ast
import linecache
import sys
from types import FrameType

_CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


def can_do_without() -> bool:
    """Whether the program's statement that is running stands in a `try` that catches an ImportError. False where there is no source."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    if frame is None:
        return False
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    return any(
        node.body[0].lineno <= frame.f_lineno <= (node.body[-1].end_lineno or 0) and any(map(_catches, node.handlers))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Try)
    )


def _catches(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or any(isinstance(node, ast.Name) and node.id in _CAUGHT for node in ast.walk(handler.type))
