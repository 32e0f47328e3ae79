"""One mutant after the other in a copy of the checkout: each is tried in a child forked from a pytest that has not imported hmp."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from .choosing import Choice
from .mutants import Mutant

CPU_LIMIT, IDLE_LIMIT = 90, 120  # seconds of the processor, and without it: a loaded machine changes neither much


def copy_of(root: Path, target: Path) -> Path:
    """The tracked files of the checkout, where a changed hmp hurts nobody."""
    shutil.rmtree(target, ignore_errors=True)
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=root, text=True).split("\0"):
        if name and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    subprocess.check_call([sys.executable, "-m", "compileall", "-q", str(target / "hmp")])
    return target


class _Judge:
    """In a child: ends it at the first failure, or when its tests have had their time, and leaves the outcome in a file.

    With no time to give, it only says which tests there are.
    """

    def __init__(self, order: Sequence[str], seconds: float, outcome: Path) -> None:
        self.order, self.seconds, self.outcome = {test: place for place, test in enumerate(order)}, seconds, outcome
        self.ran: list[str] = []

    def leave(self, killer: str) -> None:
        """Say who noticed the mutant, "" for nobody, and be gone: what follows in pytest takes seconds."""
        self.outcome.write_text(json.dumps({"killer": killer, "ran": self.ran}))
        os._exit(0)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self.seconds:
            self.ran = [item.nodeid for item in items]
            self.leave("")
        items.sort(key=lambda item: self.order.get(item.nodeid, len(self.order)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.leave(f"import of {report.nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.leave(report.nodeid)
        if report.when == "teardown":
            self.ran.append(report.nodeid)
            spent = os.times()
            if spent.user + spent.system + spent.children_user + spent.children_system > self.seconds:
                self.leave("")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.leave("" if exitstatus in (0, 5) else f"pytest's status {exitstatus}")


class Worker:
    """A plugin: takes the place of the collection in a pytest that has all but hmp, and forks a child for each mutant."""

    def __init__(self, copy: Path, choice: Choice, seconds: float, work: Callable[[Worker], None]) -> None:
        self.copy, self.choice, self.seconds, self.work = copy, choice, seconds, work
        self.trusted: set[str] = set()
        self.excluded: set[str] = set()
        self.session: pytest.Session | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        if self.session is not None or any(name.partition(".")[0] == "hmp" for name in sys.modules):
            raise RuntimeError("hmp is imported already")
        self.session = session
        self.work(self)  # in a child this returns, with the tests chosen, and pytest goes on there
        if self.session is not None:
            os._exit(0)

    def settled(self) -> bool:
        """Ask a few tests of each file about hmp as it is, which must be green, and keep the compiled files. False in a child."""
        sys.dont_write_bytecode = False
        everything = self.child(sorted({test.partition("::")[0] for test in self.choice.names}), seconds=0)
        if everything is None:
            return False
        self.excluded = {*self.choice.names}.difference(everything["ran"])  # such as a file's that cannot be imported here
        while True:
            few = [test for test in self.choice.few() if test not in self.excluded]
            found = self.child(few)
            if found is None:
                return False
            if found["killer"] not in few:
                break
            self.excluded.add(found["killer"])
        sys.dont_write_bytecode = True
        if found["killer"] or not few:
            raise RuntimeError(f"without a mutant: {found}")
        print(f"green without a mutant: {len(found['ran'])} tests; left out: {sorted(self.excluded)}", flush=True)
        return True

    def child(self, tests: Sequence[str], seconds: float | None = None) -> dict[str, Any] | None:
        """The outcome of the tests with the copy as it is now; None in the child itself."""
        outcome = self.copy / ".outcome.json"
        outcome.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            os.setsid()  # what the tests start ends with them
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT + 5))
            assert self.session is not None
            self.session.config.args = list(tests)
            self.session.config.pluginmanager.register(_Judge(tests, self.seconds if seconds is None else seconds, outcome))
            self.session = None
            return None
        status = self._wait(pid)
        if outcome.exists():
            return json.loads(outcome.read_text())
        return {"killer": "timeout" if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (9, 24) else f"crash {status}", "ran": []}

    def _wait(self, pid: int) -> int:
        spent, since = 0, time.monotonic()
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                now = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
                if now != spent:
                    spent, since = now, time.monotonic()
                if time.monotonic() < since + IDLE_LIMIT:
                    time.sleep(0.1)
                    continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return status if done else os.waitpid(pid, 0)[1]

    def outcome(self, mutant: Mutant) -> dict[str, Any] | None:
        """What became of a mutant that has a source; None in a child.

        A test that fails without the mutant too is left out from then on, and the others are asked again.
        """
        old, new = mutant.change(self.copy)
        source = mutant.source(self.copy)
        assert source is not None
        file, began = self.copy / mutant.file, time.monotonic()
        before, times = file.read_bytes(), file.stat()
        while True:
            tests = [test for test in self.choice.tests(mutant) if test not in self.excluded]
            file.write_text(source, encoding="utf-8")
            importlib.invalidate_caches()
            found = self.child(tests)
            if found is None:
                return None
            file.write_bytes(before)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled file is still its own
            killer = found["killer"]
            if killer not in tests or killer in self.trusted:
                break
            without = self.child([*found["ran"], killer])
            if without is None:
                return None
            if without["killer"] == "":
                self.trusted.add(killer)
                break
            self.excluded.add(without["killer"])
        return {
            **vars(mutant),
            "before": old,
            "after": new,
            "outcome": "killed" if found["killer"] else "survived",
            "killer": found["killer"],
            "is_run": self.choice.is_run(mutant),
            "tests": len(found["ran"]),
            "chosen": len(tests),
            "seconds": round(time.monotonic() - began, 1),
        }


def start(copy: Path, choice: Choice, seconds: float, work: Callable[[Worker], None]) -> None:
    """Become a worker: pytest is set up in the copy, then `work` is called with it. Does not return."""
    os.nice(5)
    os.chdir(copy)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    for name in ("numpy", "torch", "hypothesis"):
        importlib.import_module(name)
    options = ["-x", "-m", "", "-p", "no:hmp", "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:cov", "-p", "no:xdist"]
    os._exit(int(pytest.main([*options, "tests"], plugins=[Worker(copy, choice, seconds, work)])))
