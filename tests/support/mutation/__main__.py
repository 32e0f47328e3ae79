"""`python -m tests.support.mutation cover`, then `run`, then `page`; each takes up what an earlier one left in .build/mutation."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db

from . import covering, mutants, page

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / ".build" / "mutation"
COVERING, ABOUT, KEPT = BUILD / "covering.json", BUILD / "about.json", ROOT / "benchmarks" / "results" / "mutants.json"
NOT_ASKED = {"device", "project", "support"}  # of the page's making, of other devices, of other things than hmp
FOLDERS = sorted({file.relative_to(ROOT / "tests").parts[0] for file in (ROOT / "tests").glob("*/**/test_*.py")} - NOT_ASKED)
PYTEST = f"{sys.executable} -m pytest -x -q -m '' -n 0 -p no:cacheprovider -p no:cov --tb=no"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and do the one thing that it asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutation", description="Mutation testing of the core of hmp.")
    commands = parser.add_subparsers(dest="command", required=True)
    cover = commands.add_parser("cover", help="run the tests of these folders under coverage, and keep which runs which line")
    cover.add_argument("folders", nargs="*", default=FOLDERS)
    cover.add_argument("--workers", type=int, default=2)
    run = commands.add_parser("run", help="try the mutants that have no outcome yet")
    run.add_argument("--number", type=int, default=600)
    run.add_argument("--seed", type=int, default=28)
    run.add_argument("--budget", type=float, default=40, help="seconds that one mutant's tests took when they were measured, at most")
    run.add_argument("--workers", type=int, default=2, help="each has a copy of the checkout and a session of cosmic-ray's")
    commands.add_parser("page", help=f"write {KEPT.relative_to(ROOT)} and {page.PAGE} from what was found")
    asked = parser.parse_args(arguments)
    if asked.command == "cover":
        covering.measure(ROOT, COVERING, asked.folders, asked.workers)
    elif asked.command == "run":
        _run(asked)
    else:
        page.write(ROOT, ABOUT, covering.Choice(ROOT, COVERING) if ABOUT.exists() else None, KEPT)


def _run(asked: argparse.Namespace) -> None:
    choice = covering.Choice(ROOT, COVERING)
    commit = subprocess.check_output(["git", "log", "-1", "--format=%h", "--", "hmp", "op_lists", "tests"], cwd=ROOT, text=True).strip()
    about = {"seed": asked.seed, "asked": asked.number, "commit": commit, "budget": asked.budget, "workers": asked.workers}
    about |= {"tests": len(choice.names), "folders": dict.fromkeys(choice.folders, 1)}
    if ABOUT.exists() and json.loads(ABOUT.read_text()) != about:
        raise SystemExit(f"{ABOUT} is of {ABOUT.read_text()}, not of {json.dumps(about)}: move {BUILD} away first")
    if not ABOUT.exists():
        drawn = mutants.sample(ROOT, asked.number, asked.seed)
        for worker in range(asked.workers):
            with use_db(str(BUILD / f"session{worker}.sqlite")) as session:
                session.add_work_items(drawn[worker :: asked.workers])
        ABOUT.write_text(json.dumps(about))
    workers = [multiprocessing.Process(target=_try_all, args=(number, choice, asked.budget)) for number in range(asked.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _try_all(number: int, choice: covering.Choice, budget: float) -> None:
    """Those of one session, in a copy of what is committed, where a changed hmp hurts nobody."""
    copy = BUILD / f"copy{number}"
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.check_call(["git", "checkout-index", "--all", f"--prefix={copy}/"], cwd=ROOT)
    os.chdir(copy)
    os.environ |= {"HMP_TEST_THREADS": "1", "PYTHONPATH": str(copy)}
    with use_db(str(BUILD / f"session{number}.sqlite")) as session:
        for item in sorted(session.pending_work_items, key=lambda item: item.job_id):
            tests = choice.tests(item.mutations[0], budget)
            result = mutate_and_test(item.mutations, f"{PYTEST} {shlex.join(tests)}", 3 * budget + 60)
            session.set_result(item.job_id, result)
            print(f"{result.test_outcome} {page.place(item.mutations[0])} {page.killer(result)}", flush=True)


if __name__ == "__main__":
    main()
