"""Numbers with their units and the names of list entries, as reports show them."""

from __future__ import annotations

from ..formatting import units

NOTHING = "-"


def duration(seconds: float) -> str:
    """`seconds` with three digits and a unit; "-" for none."""
    return units.duration(seconds) if seconds else NOTHING


def typeset_duration(seconds: float) -> str:
    """`duration(seconds)` with the sign µ, for pages."""
    return duration(seconds).replace("us", "µs")


def size(number: float) -> str:
    """A number of bytes with a unit; "-" for none."""
    return units.size(number) if number else NOTHING


def share(part: float, whole: float) -> str:
    """`part` of `whole` in percent."""
    if not whole:
        return NOTHING
    percent = 100 * part / whole
    return "0 %" if percent == 0 else "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def entry(source: str) -> str:
    """A row's list entry with the last two parts of its file: op_lists/habana/bf16.txt is known as habana/bf16.txt."""
    name, _, where = source.partition(" (")
    return f"{name} ({'/'.join(where.rstrip(')').split('/')[-2:])})" if where else name
