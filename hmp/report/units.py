"""Numbers with their units, as reports show them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`seconds` with three digits and a unit."""
    if seconds == 0:
        return "-"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            break
    return f"{seconds * factor:.3g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"


def size(number: float) -> str:
    """A number of bytes with a unit."""
    if number == 0:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def share(part: float, whole: float) -> str:
    """`part` of `whole` in percent."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    return "0 %" if percent == 0 else "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def entry(source: str) -> str:
    """A row's list entry with the last two parts of its file: op_lists/habana/bf16.txt is known as habana/bf16.txt."""
    name, _, where = source.partition(" (")
    return f"{name} ({'/'.join(where.rstrip(')').split('/')[-2:])})" if where else name
