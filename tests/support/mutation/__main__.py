"""`python -m tests.support.mutation cover`, then `run`, then `page`; each takes up what an earlier one left in .build/mutation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import covering, page, trying
from .choosing import MOST

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / ".build" / "mutation"
COVERING, FOUND = BUILD / "covering.json", BUILD / "found.jsonl"
KEPT = ROOT / "benchmarks" / "results" / "mutants.json"
NOT_ASKED = {"device", "project", "support"}  # of the page's making, of other devices, of other things than hmp
FOLDERS = sorted({file.relative_to(ROOT / "tests").parts[0] for file in (ROOT / "tests").glob("*/**/test_*.py")} - NOT_ASKED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and do the one thing that it asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutation", description="Mutation testing of the core of hmp.")
    commands = parser.add_subparsers(dest="command", required=True)
    cover = commands.add_parser("cover", help="run the tests of these folders under coverage, and keep which runs which line")
    cover.add_argument("folders", nargs="*", default=FOLDERS)
    cover.add_argument("--workers", type=int, default=2)
    cover.add_argument("--every", type=int, default=1, help="measure only every nth test, always the same ones")
    run = commands.add_parser("run", help="try the mutants that have no outcome yet")
    run.add_argument("--number", type=int, default=600)
    run.add_argument("--seed", type=int, default=28)
    run.add_argument("--budget", type=float, default=40, help="seconds of the processor that one mutant's tests may take")
    run.add_argument("--until", default="23:59:59", help="the time of today, UTC, after which no mutant is begun")
    run.add_argument("--workers", type=int, default=2)
    commands.add_parser("page", help=f"write {KEPT.relative_to(ROOT)} and {page.PAGE} from what was found")
    asked = parser.parse_args(arguments)
    if asked.command == "cover":
        covering.measure(ROOT, COVERING, asked.folders, asked.workers, asked.every)
    elif asked.command == "run":
        trying.run(ROOT, COVERING, FOUND, asked)
    else:
        page.write(ROOT, FOUND, KEPT, MOST)


if __name__ == "__main__":
    main()
