"""Streams and events of torch.hpu: those of the device that stands for "hpu"; on the CPU ops run in order and a stream is nothing."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from .device_map import forwarded, of_device

__all__ = ["Event", "Stream", "current_stream", "default_stream", "set_stream", "stream"]


class _Stream:
    """The only stream that the CPU has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing waits."""

    def query(self) -> bool:
        """True: nothing waits."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Nothing waits."""

    def wait_event(self, event: Any) -> None:
        """Nothing waits."""

    def record_event(self, event: Any = None) -> Any:
        """The event, recorded."""
        event = _Event() if event is None else event
        event.record(self)
        return event


class _Event:
    """A moment on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        """Notes the time."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """True: nothing waits."""
        return True

    def synchronize(self) -> None:
        """Nothing waits."""

    def wait(self, stream: Any = None) -> None:
        """Nothing waits."""

    def elapsed_time(self, end_event: _Event) -> float:
        """Milliseconds until another event."""
        if self._at is None or end_event._at is None:
            raise RuntimeError("both events must be recorded before the time between them is asked for")
        return (end_event._at - self._at) * 1000


_stream = _Stream()


Stream = forwarded("Stream", _Stream, "A stream.")
Event = forwarded("Event", _Event, "An event.")
current_stream = of_device("current_stream", lambda: _stream, "The stream that ops run in.")
default_stream = of_device("default_stream", lambda: _stream, "The stream that ops run in unless another one is entered.")
set_stream = forwarded("set_stream", lambda stream: None, "Has ops run in `stream`.")
stream = forwarded("stream", lambda stream: contextlib.nullcontext(), "A region whose ops run in `stream`.")
