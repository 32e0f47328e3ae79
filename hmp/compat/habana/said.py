"""What is said once: through the logger `hmp`, until the shim is taken away."""

from __future__ import annotations

from ...observing import log, speaks

_said: set[str] = set()


def say_once(key: str, message: str) -> None:
    """Logs a warning, unless one was logged under that key before; of a distributed run's processes only rank 0 speaks."""
    if key not in _said:
        _said.add(key)
        if speaks():
            log.warning("%s", message)


def forget_said() -> None:
    """Everything may be said again."""
    _said.clear()
