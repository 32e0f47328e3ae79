"""What hmp assumes of Gaudi's bridge to torch, read from the comments that say so where it is assumed: `python docs/making/gaudi.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MARK = "# on Gaudi: "
_COMMENT = re.compile(rf"^( *){MARK}(.*\n(?:\1# (?!on Gaudi).*\n)*)", re.MULTILINE)
_FOLDERS = ("hmp", "tests/device", "tests/support")


def page() -> str:
    """A row for each assumption."""
    rows = "\n".join(f"| `{place}` | {said.replace('|', chr(92) + '|')} |" for place, said in _assumed())
    return f"""# What is assumed of Gaudi

hmp was run on no Gaudi: what it does with Habana's bridge, the package `habana_frameworks.torch` which makes `"hpu"` a device of torch's,
is written from Habana's documentation. These are all places in the code that depend on the bridge, and what each takes for granted.
Whatever else runs on `"hpu"` is decided by dtypes, as on every device, and was run on XLA and on a device of the tests' own.

On a machine with a Gaudi `.ci/device --device hpu` asks: it needs torch, the bridge, pytest, hypothesis and numpy, no network, takes
ten minutes at most, and writes a page of what passed, failed and was not run. What is CUDA's own, CUDA graphs among it, says so.

| where | what is assumed |
|---|---|
{rows}
"""


def _assumed() -> Iterator[tuple[str, str]]:
    for folder in _FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield from ((str(file.relative_to(ROOT)), said) for said in _of(file))


def _of(file: Path) -> Iterator[str]:
    for found in _COMMENT.finditer(file.read_text(encoding="utf-8")):
        yield " ".join(line.strip().removeprefix("# ") for line in found[2].splitlines())


if __name__ == "__main__":
    print(page())
