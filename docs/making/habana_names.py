"""Every name of Habana's packages that programs import, with what it is under hmp: made of the table that the modules are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hmp.compat.habana import modules, names
from hmp.compat.habana.no_ops import ERROR, WORKS, status


def inserted() -> str:
    """Return a row for each name."""
    rows = list(all_names())
    counts = {state: sum(state == each[1] for each in rows) for state in (WORKS, "does nothing", ERROR)}
    table = "\n".join(f"| `{name}` | {state} | {words} |" for name, state, words in rows)
    return f"""### All names

{len(rows)} names: {counts[WORKS]} work, {counts["does nothing"]} do nothing and log it once,
{counts[ERROR]} raise an error that says what to use instead. `*` is every other name of the module.

<div class="filtered" markdown>

| name | here | what that is |
|---|---|---|
{table}

</div>
"""


def all_names() -> Iterator[tuple[str, str, str]]:
    """Each name, its state, and what it is, does not do, or what to use in its place."""
    for module, entry in names.TREE.items():
        if entry.itself is not None:
            yield module, *entry.itself
        if entry.source == "hmp":
            yield f"{module}.*", WORKS, "hmp: [its public names](../reference/api.md)"
            continue
        found = modules.public_names(module)
        for name in sorted({*found, *entry.names.split()}, key=str.lower):
            state, words = _of(found.get(name))
            if words:  # else it is what torch calls, and no program
                yield f"{module}.{name}", state, words
        if "*" in (why := names.by_name(entry.nothing)):
            yield f"{module}.*", "does nothing", why["*"]
        for name, words in names.by_name(entry.errors).items():
            yield f"{module}.{name}", ERROR, words


def _of(value: Any) -> tuple[str, str]:
    if value is None:
        return WORKS, "torchvision's `ImageFolder`"  # which need not be installed
    state, words = status(value)
    return state, words or " ".join((value.__doc__ or "").partition("\n\n")[0].split()).removesuffix(".")
