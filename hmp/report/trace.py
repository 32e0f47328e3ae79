"""A recording as a trace that chrome://tracing and Perfetto show: ops and their casts as slices, thread by thread."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..formatting import versioned, written

MOST = 200_000  # slices of a recording; later ones are counted, not kept
MOST_PACKED, MOST_BYTES = 20_000, 300_000  # of these in a page, which stays below 2 MB


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


def write(path: str | Path, slices: Slices, about: Mapping[str, Any]) -> Path:
    """Writes the slices into the file `path`, which is returned, in the JSON Trace Event Format: times in microseconds."""
    return written(path, lambda: _json(slices.kept[:], slices.left_out, about) + "\n")


def packed(slices: Slices, about: Mapping[str, Any]) -> tuple[bytes, int]:
    """The same, compressed by gzip, as Perfetto opens it too: of as many first slices as make a page no larger than it may be; and how
    many these are."""
    every = slices.kept[:]
    kept = every[:MOST_PACKED]
    while True:
        data = gzip.compress(_json(kept, slices.left_out + len(every) - len(kept), about).encode(), mtime=0)
        if len(data) <= MOST_BYTES:
            return data, len(kept)
        kept = kept[: len(kept) // 2]


def _json(slices: Iterable[Slice], left_out: int, about: Mapping[str, Any]) -> str:
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
    others = {name: about[name] for name in ("device", "torch")} | {"slices_left_out": left_out}
    return json.dumps(versioned({"traceEvents": events, "displayTimeUnit": "ms", "otherData": others}))
