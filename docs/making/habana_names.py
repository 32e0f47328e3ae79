"""The page of every name of Habana's that programs import, with what it is under hmp: made of the table that the modules are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hmp.compat.habana import modules, names
from hmp.compat.habana.no_ops import ERROR, WORKS, status


def page() -> str:
    """A row for each name."""
    rows = list(all_names())
    counts = {state: sum(state == each[1] for each in rows) for state in (WORKS, "does nothing", ERROR)}
    table = "\n".join(f"| `{name}` | {state} | {words} |" for name, state, words in rows)
    return f"""# Names of Habana's

What [`hmp run --habana`](../how-to/habana-scripts.md) answers when a program imports it from Habana's packages: {len(rows)} names, of
which {counts[WORKS]} work, {counts["does nothing"]} do nothing and say so once, and {counts[ERROR]} are errors.

- What does nothing switches or measures what there is only on Gaudi.
- What is an error gives what a program would use. Importing it is an `ImportError` that says what to take in its place, so that a program
  that asks first goes its other way. `fetch_habana_unet_loader` can be imported where no `try` catches that, and calling it is an
  `HmpError`.
- Any other name is a `ModuleNotFoundError` or an `AttributeError` that says what there is. A star stands for whatever is asked for.

`habana_frameworks.mediapipe` is there while `lightning_habana` itself is imported, which cannot do without; using it is an error. Where
Habana's own packages are installed they are used.

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
            yield f"{module}.*", WORKS, "hmp: [its public names](api.md)"
            continue
        found = modules.public_names(module)
        for name in sorted({*found, *entry.names.split()}, key=str.lower):
            state, words = _of(found.get(name))
            if words:  # else it is what torch calls, and no program
                yield f"{module}.{name}", state, words
        if "*" in (why := entry.no_ops()):
            yield f"{module}.*", "does nothing", why["*"]
        for name, words in entry.alternatives().items():
            yield f"{module}.{name}", ERROR, words


def _of(value: Any) -> tuple[str, str]:
    if value is None:
        return WORKS, "torchvision's `ImageFolder`"  # which need not be installed
    state, words = status(value)
    return state, words or " ".join((value.__doc__ or "").partition("\n\n")[0].split()).removesuffix(".")
