"""What `.ci/versions` found with each torch and Python, and the tables of it in docs/dev/tested-versions.md.

`.ci/versions` calls `python docs/making/versions.py LOG TESTS` with the Python that ran the tests: it reads pytest's last line, tries what
not every release can do, notes both in docs/releases/versions.json, and writes the tables anew.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "releases" / "versions.json"
PAGE = ROOT / "docs" / "dev" / "tested-versions.md"
DEFAULT, XLA = "default", "tests/device/test_xla.py"
FEATURES = ("casts", "casts in compiled models", "export", "strict export", "packing what ops keep for backward")
_COUNTED = ("passed", "failed", "skipped", "xfailed")
_COLUMNS = ("torch", "python", "tests", *_COUNTED, "date", "commit")


def results() -> list[dict[str, Any]]:
    """The last run of each torch, Python and selection of tests."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return found


def runs_table() -> str:
    """A row for each run."""
    return _table([list(_COLUMNS), *([str(each[column]) for column in _COLUMNS] for each in results())])


def features_table() -> str:
    """A row for each feature, a column for each release of torch."""
    by_release: dict[str, dict[str, str]] = {}
    for each in results():
        by_release.setdefault(each["torch"].partition("+")[0], {}).update(each["features"])
    rows = [[feature, *(its.get(feature, "not tried") for its in by_release.values())] for feature in FEATURES]
    return _table([["torch", *by_release], *rows])


def _table(lines: list[list[str]]) -> str:
    head, *rows = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def with_tables(page: str) -> str:
    """The page with the tables of now."""
    tables = iter((runs_table(), features_table()))
    return re.sub(r"^\| torch \|.*\n(\|.*\n)*", lambda _: next(tables), page, flags=re.MULTILINE)


def counts(log: str) -> dict[str, int]:
    """What pytest's last line says; an error of a fixture is a failure too. None of each where it did not come to an end."""
    closing = re.findall(r"^=* ?(\d+ .+) in [\d.]+s\b.*$", log, re.MULTILINE)
    found = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", closing[-1])} if closing else {"failed": 1}
    found["failed"] = found.get("failed", 0) + found.get("errors", 0) + found.get("error", 0)
    return {word: found.get(word, 0) for word in _COUNTED}


def is_replaced(earlier: dict[str, Any], run: dict[str, Any]) -> bool:
    """Whether a run says all that an earlier one said: of the same torch and Python, with the same tests, or with all default ones."""
    same = earlier["torch"] == run["torch"] and earlier["python"] == run["python"]
    return same and (earlier["tests"] == run["tests"] or (run["tests"] == DEFAULT and earlier["tests"] != XLA))


def note(log: str, tests: str) -> None:
    """Notes a run in place of those that it replaces."""
    import features
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    run: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version() + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""),
        "platform": f"{platform.system()} {platform.machine()}",
        "tests": tests,
        **counts(log),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "features": features.found(),
    }
    others = [each for each in results() if not is_replaced(each, run)]
    ordered = sorted(
        [*others, run], key=lambda each: ([int(n) for n in re.findall(r"\d+", f"{each['torch']} {each['python']}")], each["tests"])
    )
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        note(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2])
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
