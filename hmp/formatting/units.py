"""Numbers with their units, counts and dtypes, as tables and messages show them."""

from __future__ import annotations

import torch


def duration(seconds: float) -> str:
    """`seconds` with three digits and a unit."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            break
    return f"{seconds * factor:.3g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"


def size(number: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """A number of things: `1 call`, `2 calls`."""
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
