"""`python -m benchmarks`: the cost of hmp, measured in turns with torch.autocast, plain torch and a hand-written wrapper.

Prints a table of targets and results, and writes RESULTS.md, results.json and the figures. About a quarter of an hour on two cores;
--full takes about an hour. --smallest takes a minute or two and only checks that everything works.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from .cost import scale
from .cost.scale import Scale
from .harness import plots, results
from .harness.results import Found
from .workloads.models import MODELS, SIZES, available

PARTS = (
    "calls",
    "training",
    "inference",
    "optimizers",
    "memory",
    "narrow",
    "reused",
    "weights",
    "gradients",
    "startup",
    "depth",
    "compiled",
    "recording",
    "fp8",
    "saved",
    "low_kernels",
)
WITHOUT_MODELS = ("calls", "optimizers", "narrow", "reused", "startup", "depth", "compiled", "recording", "fp8", "saved", "low_kernels")


def _names(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in allowed]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(allowed)}")
        return names

    return parse


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = made.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="more rounds, more seeds")
    size.add_argument("--smallest", action="store_true", help="one round of everything at the tiny size: proves that it works")
    made.add_argument(
        "--only",
        type=_names(PARTS),
        default=[part for part in PARTS if part != "low_kernels"],  # which asks for another processor's kernels, and has a page of its own
        metavar="PARTS",
        help=f"of {','.join(PARTS)}; all but the last",
    )
    made.add_argument("--models", type=_names(tuple(MODELS)), default=list(MODELS), metavar="MODELS", help=f"of {','.join(MODELS)}")
    made.add_argument("--sizes", type=_names(SIZES), metavar="SIZES", help=f"of {','.join(SIZES)}, in every part that has sizes")
    made.add_argument("--rounds", type=int, help="rounds (and seeds and processes) of every part, instead of the run's own numbers")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu", help="of the models")
    made.add_argument("--threads", type=int, help="torch.set_num_threads; torch's own number unless given")
    made.add_argument(
        "--write", metavar="FOLDER", type=Path, help="for the results; benchmarks/results/, or a temporary folder for less than all"
    )
    made.add_argument("--name", default="RESULTS", help="of the page and, in small letters, of its file of samples (RESULTS)")
    made.add_argument("--before", nargs=2, metavar=("NAME", "FILE"), help="a results.json of another commit's run, shown beside this one")
    return made


def chosen_scale(options: argparse.Namespace) -> Scale:
    """Return how much to measure, by the options."""
    from dataclasses import replace

    found = scale.FULL if options.full else scale.SMALLEST if options.smallest else scale.QUICK
    if options.sizes:
        sizes = tuple(options.sizes)
        found = replace(found, sizes=sizes, gradient_sizes=sizes)
    if options.rounds:
        count = options.rounds
        rounds = dict.fromkeys(SIZES, count)
        found = replace(
            found,
            call_rounds=count,
            rounds=rounds,
            seeds=count,
            optimizer_rounds=count,
            narrow_rounds=count,
            reused_rounds=count,
            processes=count,
            depth_rounds=count,
            compiled_rounds=count,
            warm_rounds=count,
            recording_rounds=count,
            saved_rounds=count,
            low_rounds=count,
        )
    return found


def is_whole(options: argparse.Namespace) -> bool:
    """Return True if the whole benchmark was measured, so that its results may replace those in benchmarks/results/."""
    return changed_options(options, "smallest", "only", "models", "sizes", "rounds") == ""


def changed_options(options: argparse.Namespace, *among: str) -> str:
    """Return the options that differ from their defaults, as on a command line, without the paths of results."""
    defaults = parser().parse_args([])
    words = []
    for name, value in vars(options).items():
        if value == getattr(defaults, name) or name in ("write", "before") or (among and name not in among):
            continue
        words.append(f" --{name}")
        if value is not True:
            words.append(f" {','.join(value) if isinstance(value, list) else value}")
    return "".join(words)


def measure(options: argparse.Namespace) -> list[Found]:
    """Measure every requested part, and print its name to stderr when it begins."""
    from .cost import (
        calls,
        compiled,
        depth,
        gradients,
        in_fp8,
        interleaved,
        low_kernels,
        memory,
        narrow,
        optimizers,
        recording,
        reused,
        saved,
        startup,
        steps,
        weights,
    )

    much = chosen_scale(options)
    names, hint = available(options.models)
    if hint:
        print(hint)
    device, sizes = options.device, list(much.sizes)
    tasks = [task for task in interleaved.TASKS if ("training" if task == "training" else "inference") in options.only]
    wanted = {*options.only, *(["steps"] if tasks else [])}
    parts: dict[str, Callable[[], Found]] = {
        "calls": lambda: calls.run(much.call_rounds, much.calls),
        "steps": lambda: steps.run(names, tasks, much, device),
        "optimizers": lambda: optimizers.run(much.optimizer_rounds, much.seconds, device),
        "memory": lambda: memory.run(names, sizes, device),
        "narrow": lambda: narrow.run(much.narrow_rounds, much.seconds, options.smallest),
        "reused": lambda: reused.run(much.reused_rounds, much.seconds, device, options.smallest),
        "weights": lambda: weights.run(much.narrow_rounds, much.seconds, options.smallest),
        "gradients": lambda: gradients.run(names, list(much.gradient_sizes), much.seeds, device),
        "startup": lambda: startup.run(much.processes),
        "depth": lambda: depth.run(list(much.depths), list(much.widths), much.depth_rounds, much.seconds),
        "compiled": lambda: compiled.run(*much.compiled, much.compiled_rounds, much.warm_rounds, much.seconds),
        "recording": lambda: recording.run(much.recording_rounds, device, options.smallest),
        "fp8": lambda: in_fp8.run(much.rounds["medium"], device),
        "saved": lambda: saved.run(list(much.saved_widths), much.saved_rounds),
        "low_kernels": lambda: low_kernels.run(much.low_rounds, much.seconds, options.smallest),
    }
    found = []
    for name, run in parts.items():
        if name in wanted and (names or name in WITHOUT_MODELS):
            start = time.perf_counter()
            print(f"{name} ...", end="", file=sys.stderr, flush=True)
            try:
                found.append(run())
            except Exception as error:  # the other parts' figures are not lost
                traceback.print_exc()
                found.append(Found(name, failures=[f"{name}: {type(error).__name__}: {error}"]))
            print(f" {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print and write the results; return 1 if two sides did not compute the same."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    start = time.perf_counter()
    about = results.machine(options.device)
    found = measure(options)
    seconds = time.perf_counter() - start
    for part in found:
        print(f"\n{part.part}\n" + "\n".join(part.details))
    print("\n" + results.table([row for part in found for row in part.rows]) + "\n")
    failures = [failure for part in found for failure in part.failures]
    for failure in failures:
        print(f"failed: {failure}")
    folder = options.write or (Path(__file__).parent / "results" if is_whole(options) else Path(tempfile.mkdtemp(prefix="hmp-benchmarks-")))
    folder.mkdir(parents=True, exist_ok=True)
    kernels = "".join(f"{each}={os.environ[each]} " for each in results.KERNELS_BY if each in os.environ)
    command = f"{kernels}python -m benchmarks{changed_options(options)}"
    drawn = plots.draw(found, folder)
    before = (options.before[0], Path(options.before[1])) if options.before else None
    page = results.report(found, about, command, seconds, drawn, before, options.name)
    (folder / f"{options.name}.md").write_text(page, encoding="utf-8")
    (folder / f"{options.name.lower()}.json").write_text(results.as_json(found, about, command, seconds), encoding="utf-8")
    print(f"{seconds:.0f} s; written to {folder}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
