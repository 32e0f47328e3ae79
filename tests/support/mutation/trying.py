"""The mutants of a sample, shared out among workers; what became of each is written at once, so that a run can be taken up again."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import time
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Lock
from pathlib import Path

from . import runs
from .choosing import Choice
from .mutants import Mutant, sample


def _commit(root: Path) -> str:
    """The last commit that changed hmp or its tests, these files apart."""
    what = ["hmp", "op_lists", "tests/*.py", ":!tests/support/mutation"]
    return subprocess.check_output(["git", "log", "-1", "--format=%h", "--", *what], cwd=root, text=True).strip()


def run(root: Path, covering: Path, found: Path, asked: argparse.Namespace) -> None:
    """Try those of the sample that have no line in `found` yet, and add one for each."""
    choice = Choice(root, covering)
    about = {"seed": asked.seed, "asked": asked.number, "commit": _commit(root), "budget": asked.budget}
    about |= {"tests": len(choice.names), "folders": choice.folders}
    lines = found.read_text().splitlines() if found.exists() else []
    if lines and json.loads(lines[0]) != about:
        raise SystemExit(f"{found} is of {lines[0]}, not of {json.dumps(about)}: move it away first")
    if not lines:
        found.write_text(json.dumps(about) + "\n")
    done = {Mutant(**{key: each[key] for key in Mutant.__dataclass_fields__}) for each in map(json.loads, lines[1:])}
    left = [mutant for mutant in sample(root, asked.number, asked.seed) if mutant not in done]
    print(f"{len(done)} are done, {len(left)} left", flush=True)
    spawn = multiprocessing.get_context("spawn")
    queue: SimpleQueue[Mutant | None] = spawn.SimpleQueue()
    given = (root, covering, found, asked, queue, spawn.Lock())
    workers = [spawn.Process(target=_worker, args=(number, *given)) for number in range(asked.workers)]
    for worker in workers:
        worker.start()
    for mutant in [*left, *[None] * len(workers)]:
        queue.put(mutant)
    for worker in workers:
        worker.join()


def _worker(
    number: int, root: Path, covering: Path, found: Path, asked: argparse.Namespace, queue: SimpleQueue[Mutant | None], lock: Lock
) -> None:
    choice = Choice(root, covering)

    def work(worker: runs.Worker) -> None:
        if not worker.settled():
            return
        while (mutant := queue.get()) is not None:
            if time.strftime("%H:%M:%S", time.gmtime()) > asked.until or mutant.source(root) is None:
                continue
            outcome = worker.outcome(mutant)
            if outcome is None:
                return
            with lock, found.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
            where = f"{mutant.file}:{mutant.line} {mutant.operator}"
            print(f"{outcome['outcome']:8} {outcome['seconds']:6} s  {where} {outcome['killer']}", flush=True)

    os.environ["HMP_TEST_THREADS"] = "1"
    runs.start(runs.copy_of(root, found.parent / f"copy{number}"), choice, asked.budget, work)
