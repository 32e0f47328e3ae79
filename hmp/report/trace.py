"""A recording as a trace that chrome://tracing and Perfetto show: ops and their casts as slices, thread by thread."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..formatting import versioned, written

MOST = 200_000  # slices of a recording; later ones are counted, not kept


# One op or one cast: its name and kind, when it began and how long it took in seconds of the clock that the recording reads, its thread,
# and of an op the rule, what it computed in and the module. A plain tuple, which the garbage collector stops looking at.
Slice = tuple[str, str, float, float, int, str, str, str]


class Slices:
    """The slices of a recording, the first `MOST` of them."""

    def __init__(self) -> None:
        self.kept: list[Slice] = []
        self.left_out = 0

    def add(self, name: str, kind: str, began: float, seconds: float, rule: str = "", computes: str = "", module: str = "") -> None:
        """Notes a slice of the calling thread."""
        if len(self.kept) >= MOST:
            self.left_out += 1
            return
        self.kept.append((name, kind, began, seconds, threading.get_ident(), rule, computes, module))


def write(path: str | Path, slices: Iterable[Slice], left_out: int, about: dict[str, Any]) -> Path:
    """Writes the slices into the file `path`, which is returned, in the JSON Trace Event Format: times in microseconds."""
    found = sorted(slices, key=lambda each: each[2])
    first = found[0][2] if found else 0.0
    events = [
        {
            "name": name,
            "cat": kind,
            "ph": "X",
            "ts": round(1e6 * (began - first), 3),
            "dur": round(1e6 * seconds, 3),
            "pid": os.getpid(),
            "tid": thread,
            "args": {key: value for key, value in (("rule", rule), ("computes", computes), ("module", module)) if value},
        }
        for name, kind, began, seconds, thread, rule, computes, module in found
    ]
    values = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about, "slices_left_out": left_out}}
    return written(path, lambda: json.dumps(versioned(values)) + "\n")
