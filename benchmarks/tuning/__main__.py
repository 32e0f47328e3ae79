"""`python -m benchmarks.tuning`: the results of hmp.tune() for six models, four of them larger, too, and three planted failures.

Writes TUNING.md and tuning.json. A stopped run continues with the same --out; about 50 minutes on one idle core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..harness import results
from . import exhaustive, report
from .evidence import QUICK, Extent, collect
from .tasks import TASKS

COMMITTED = Path(__file__).parents[1] / "results"
ALL_SUBSETS = "subsets:"


def parts() -> list[str]:
    """Return the names that --only takes: tasks, and "subsets:NAME" for comparisons with every subset."""
    return [*TASKS, *(ALL_SUBSETS + name for name in exhaustive.CASES)]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.tuning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", action="append", choices=parts(), metavar="NAME", help=f"of {', '.join(parts())}; may be given again")
    made.add_argument("--quick", action="store_true", help="one seed, no longer training, 12 trials a search: proves that it works")
    made.add_argument("--out", type=Path, default=Path(".build/tuning"), help="for what is found on the way, where a stopped run goes on")
    made.add_argument(
        "--write", type=Path, metavar="FOLDER", help="for TUNING.md and tuning.json; benchmarks/results/, or --out for less than all"
    )
    made.add_argument("--threads", type=int, default=1, help="torch.set_num_threads (1)")
    made.add_argument("--again", action="store_true", help="forgets what --out holds")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; return 1 if an aim is missed or a part failed."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    extent = QUICK if options.quick else Extent()
    chosen = options.only or parts()
    tasks, cases, failures = [], [], []
    for name in parts():
        if name not in chosen:
            continue
        try:
            found = kept(name, extent, options)
        except Exception as error:  # the other parts' figures are not lost
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}")
        else:
            (cases if name.startswith(ALL_SUBSETS) else tasks).append(found)
    about = results.machine("cpu")
    seconds = sum(found["seconds"] for found in (*tasks, *cases))
    words = [*(f"--only {name}" for name in options.only or ()), *(["--quick"] if options.quick else [])]
    command = " ".join(["python -m benchmarks.tuning", *words])
    page = report.report(tasks, cases, about, command, seconds)
    if failures:
        page += "\n## Failed\n\n" + "".join(f"- {failure}\n" for failure in failures)
    aims = report.rows(tasks, cases)
    print(results.table(aims))
    folder = options.write or (options.out if options.quick or options.only else COMMITTED)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "TUNING.md").write_text(page, encoding="utf-8")
    written = {"command": command, "seconds": round(seconds, 1), "machine": about, "rows": [asdict(aim) for aim in aims]}
    written |= {"tasks": tasks, "subsets": cases, "failures": failures}
    (folder / "tuning.json").write_text(json.dumps(results.plain_values(written), indent=1) + "\n", encoding="utf-8")
    print(f"{seconds:.0f} s; written to {folder}")
    return 1 if failures or any(aim.met is False for aim in aims) else 0


def kept(name: str, extent: Extent, options: argparse.Namespace) -> dict[str, Any]:
    """Return the earlier results of the part, with the same extent and the same torch, or measure it now."""
    file = options.out / f"{name.replace(':', '-')}.json"
    key = {"extent": json.loads(json.dumps(asdict(extent))), "torch": torch.__version__, "threads": options.threads}
    if file.is_file() and not options.again:
        before = json.loads(file.read_text(encoding="utf-8"))
        if before["key"] == key:
            return before["found"]
    started = time.perf_counter()
    found = measured(name, extent, options.out, _say)
    found["seconds"] = round(time.perf_counter() - started, 1)
    # NaN and Infinity are read back as they were, unlike from tuning.json
    found = json.loads(json.dumps(found))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"key": key, "found": found}), encoding="utf-8")
    return found


def measured(name: str, extent: Extent, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure a part."""
    if name.startswith(ALL_SUBSETS):
        name = name.removeprefix(ALL_SUBSETS)
        return exhaustive.compare(TASKS[name], exhaustive.CASES[name], extent, out, say)
    return collect(TASKS[name], extent, out, say)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
