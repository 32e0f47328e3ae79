"""Durations, sizes, shares, counts and dtypes as tables and messages show them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

NOTHING = "-"  # fills a table's cell where there is no number


def duration(seconds: float, none: str = NOTHING) -> str:
    """`seconds` to three digits in s, ms or us: "1.5 ms"; `none` for 0."""
    if not seconds:
        return none
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            break
    return f"{seconds * factor:.3g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"


def typeset_duration(seconds: float) -> str:
    """`duration(seconds)` with "µs" for "us", for HTML pages."""
    return duration(seconds).replace("us", "µs")


def size(number: float, none: str = NOTHING) -> str:
    """A number of bytes in B, KiB, MiB, GiB or TiB: "1.5 KiB"; `none` for 0."""
    if not number:
        return none
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def share(part: float, whole: float) -> str:
    """`part` of `whole` in percent: "12 %"; "-" where `whole` is 0."""
    if not whole:
        return NOTHING
    percent = 100 * part / whole
    return "0 %" if percent == 0 else "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def count(number: int, noun: str) -> str:
    """`number` with its noun: "1 call", "2 calls"."""
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def two_digits(value: float | None) -> str:
    """An error or a gap to two digits, NOTHING where it is not known."""
    return NOTHING if value is None else "0" if value == 0 else f"{value:.2g}" if 0.001 <= value < 1000 else f"{value:.1e}"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first `most` names, and how many there are more: "a, b, c and 2 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch.": "bfloat16"."""
    return str(dtype).removeprefix("torch.")
