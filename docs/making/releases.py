"""docs/dev/releases.md, what was run under other releases of other packages, from the files that `.ci/releases` wrote.

`python docs/making/releases.py` writes it, which `.ci/releases` calls.
"""

from __future__ import annotations

import json
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_RESULTS = _ROOT / "docs" / "releases"
PAGE = _ROOT / "docs" / "dev" / "releases.md"
_HEAD = """# Other packages' releases

The results of `.ci/releases`, which `.ci/nightly` runs. Every row is an environment of its own, with the same torch. `tests/releases` has
the scripts, and the packages of each environment.
"""


def page() -> str:
    """A section for each package: what its file says, and a table."""
    return "\n".join([_HEAD, *(f"{about.read_text(encoding='utf-8')}\n{_table(about.stem)}" for about in sorted(_RESULTS.glob("*.md")))])


def _table(name: str) -> str:
    rows: dict[str, dict[str, str]] = json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[name, *(row.get(column, "") for column in columns)] for name, row in rows.items()]
    lines = [["", *columns], ["---"] * (len(columns) + 1), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
