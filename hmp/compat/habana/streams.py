"""Streams and events of torch.hpu: those of the device that "hpu" is mapped to. On the CPU ops run in order, and a stream does nothing."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from .device_map import actual_device, device_module, forwarded, of_device

__all__ = ["Event", "Stream", "current_stream", "default_stream", "set_stream", "stream"]


class _Stream:
    """The only stream that the CPU has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        """Do nothing: ops have run when their calls return."""

    def query(self) -> bool:
        """Return True: ops have run when their calls return."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: ops have run when their calls return."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: ops have run when their calls return."""

    def record_event(self, event: Any = None) -> Any:
        """Record the event, or a new one, and return it."""
        event = _Event() if event is None else event
        event.record(self)
        return event


class _Event:
    """A point in time on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        """Store the current time."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Return True: ops have run when their calls return."""
        return True

    def synchronize(self) -> None:
        """Do nothing: ops have run when their calls return."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: ops have run when their calls return."""

    def elapsed_time(self, end_event: _Event) -> float:
        """Return the time from this event to another, in milliseconds."""
        if self._at is None or end_event._at is None:
            missing = "this event" if self._at is None else "end_event"
            raise RuntimeError(f"elapsed_time(): expected two recorded events, {missing} is not recorded; call record() of both first")
        return (end_event._at - self._at) * 1000


_stream = _Stream()


Stream = forwarded("Stream", _Stream, "A stream.")
Event = forwarded("Event", _Event, "An event.")


def classes() -> dict[str, type]:
    """Return the classes of streams and events of the device that "hpu" is mapped to now."""
    on_cpu: dict[str, type] = {"Stream": _Stream, "Event": _Event}
    return on_cpu if actual_device().type == "cpu" else {name: getattr(device_module(), name) for name in on_cpu}


current_stream = of_device("current_stream", lambda: _stream, "Return the current stream.")
default_stream = of_device("default_stream", lambda: _stream, "Return the default stream.")
set_stream = forwarded("set_stream", lambda stream: None, "Make a stream the current one.")
stream = forwarded("stream", lambda stream: contextlib.nullcontext(), "Return a context in which a stream is the current one.")
