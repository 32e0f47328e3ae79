"""Compiled models: hmp against torch.autocast with the same lists, both compiled by torch's own backend.

Each side has a process of its own, in which no other casts were ever active, and graphs of earlier runs are not used. The two are measured
in turns. The first call's time is the first compile time. The warm one is that of compiling again in the same process,
after torch._dynamo.reset(), with the graphs in inductor's caches: there tracing and guards are most of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any

from ..harness.results import Found, Row, at_most
from ..harness.stats import paired_ratio

SIDES = ("autocast", "hmp")
LIMIT, WARM_LIMIT = 1.02, 1.05


class _Process:
    """One side's process, which replies to each line with a line of JSON."""

    def __init__(self, side: str, depth: int, width: int) -> None:
        command = [sys.executable, "-m", "benchmarks.cost.compiled", side, str(depth), str(width)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question: str) -> dict[str, float]:
        """Send a request and return the reply."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(question, file=self._process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self._process.stdout.readline() or "null")
        if answer is None:
            raise RuntimeError(f"the process ended with status {self._process.wait()}")
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def run(depth: int, width: int, rounds: int, warm_rounds: int, seconds: float) -> Found:
    """Return the rows of a training step, of inference and of compiling, for a transformer of so many blocks."""
    found = Found("compiled")
    processes = {side: _Process(side, depth, width) for side in SIDES}
    try:
        compiling = {side: process.ask("compile") for side, process in processes.items()}
        samples: dict[str, dict[str, list[float]]] = {task: {side: [] for side in SIDES} for task in ("training", "inference")}
        for number in range(rounds):
            for side in SIDES if number % 2 else reversed(SIDES):
                for task, taken in processes[side].ask(str(seconds)).items():
                    samples[task][side].append(taken)
        warm: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(warm_rounds):
            for side in SIDES if number % 2 else reversed(SIDES):
                warm[side].append(sum(processes[side].ask("warm").values()))
    finally:
        for process in processes.values():
            process.end()
    found.samples = {"compile seconds": compiling, "warm compile seconds": warm, **samples}
    found.details = [f"{depth} blocks {width} wide, inductor, fullgraph; medians of {rounds} rounds; the policy is torch-cpu"]
    found.details += [f"{'':10} {'autocast':>10} {'hmp':>10} {'ratio':>16} {'compile: autocast':>18} {'hmp':>7}"]
    for task, sides in samples.items():
        ratio = paired_ratio(sides["hmp"], sides["autocast"])
        times = [f"{1000 * median(sides[side]):7.3f} ms" for side in SIDES]
        took = [f"{compiling[side][task]:.1f} s" for side in SIDES]
        found.details.append(f"{task:10} {times[0]:>10} {times[1]:>10} {ratio.text(3):>16} {took[0]:>18} {took[1]:>7}")
        found.rows.append(at_most(f"compiled {task} step, hmp / torch.autocast", LIMIT, ratio, ratio.text(3)))
    again = paired_ratio(warm["hmp"], warm["autocast"])
    what = "warm compile time of both, hmp / torch.autocast"
    taken = " and ".join(f"{median(warm[side]):.2f} s" for side in reversed(SIDES))
    found.rows.append(at_most(what, WARM_LIMIT, again, f"{again.text()}; {taken}"))
    seconds_of = [sum(compiling[side].values()) for side in SIDES]
    found.rows.append(
        Row("first compile time of both, hmp and torch.autocast", "-", f"{seconds_of[1]:.1f} s and {seconds_of[0]:.1f} s", None)
    )
    return found


def _serve(side: str, depth: int, width: int) -> None:
    """Reply on stdout to the requests of `_Process` on stdin."""
    import time

    import torch

    import hmp

    from ..harness.sides import autocast
    from ..harness.timing import OWN, one_thread, step_seconds, steps_for
    from .depth import case

    # no graph of an earlier run is found under this tag, and those of this one are found again
    torch.compiler.config.cache_key_tag = f"{side} {time.time_ns()}"
    model = case(depth, width, torch.float32).model
    x = torch.randn(8, 32, width)
    if side == "hmp":
        hmp.convert(policy="torch-cpu")
    compiled: Any = torch.compile(model, fullgraph=True)
    run = autocast("cpu").run if side == "autocast" else lambda function: function()

    def training() -> None:
        loss = run(lambda: compiled(x)).float().pow(2).mean()
        loss.backward()
        model.zero_grad()

    def inference() -> None:
        with torch.no_grad():
            run(lambda: compiled(x))

    steps = {"training": training, "inference": inference}
    with one_thread():
        for line in sys.stdin:
            answer = {}
            if line.strip() == "warm":
                torch._dynamo.reset()
            for name, step in steps.items():
                start = time.perf_counter()
                if line.strip() in ("compile", "warm"):
                    step()
                    answer[name] = time.perf_counter() - start
                else:
                    answer[name] = step_seconds(step, steps_for(float(line), step, "cpu", OWN.least), "cpu", OWN)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
