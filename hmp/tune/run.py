"""One call of tune(): its arguments are checked, what an earlier one measured is read, and a search begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..benchmark.variants import in_force
from ..casting import each_tensor
from ..errors import HmpError
from ..lists import LISTS, Policy, as_policy, scopes
from . import files, identity
from .budget import Budget, Over
from .decisions import Decisions
from .journal import Journal
from .progress import Progress, shown
from .result import TuneResult
from .search import Search
from .solver import scipy
from .task import Task
from .tolerance import Tolerance, as_tolerance
from .trial import Objective, Stopped
from .trials import Trials

# What is made small, and whether packing is one of the ways, is one word of the caller's.
_SMALL: Mapping[str, Objective] = {"time": "time", "memory": "memory", "bytes": "memory"}


def run(  # noqa: PLR0913
    model: torch.nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Any],
    tolerance: float | Mapping[str, float] | Tolerance,
    metric: Callable[[Any], Any] | None,
    optimizer: Callable[[Any], Any] | None,
    budget: float | str | None,
    start: str | Path | Policy,
    per_module: bool,
    ops: Collection[str] | None,
    levels: Collection[str],
    objective: Literal["time", "memory", "bytes"],
    steps: int | None,
    seed: int,
    folder: str | Path | None,
    resume: bool,
    progress: bool | Progress | None,
) -> TuneResult:
    """What `hmp.tune()` returns."""
    scipy()
    if objective not in ("time", "memory", "bytes"):
        raise HmpError(
            f'objective={objective!r} is unknown; give "time" (of a step), "memory" (kept for backward) or "bytes" (kept, with packing)'
        )
    packs, small = objective == "bytes", _SMALL[objective]
    bounds = as_tolerance(tolerance, metric is not None)
    begin = _start(as_policy(start, model), levels, packs)
    allowed = Budget(budget)
    shared = scopes.shared(model) if per_module and isinstance(model, torch.nn.Module) else ()
    decisions = Decisions(begin, ops, per_module, shared, in_fp8=_in_fp8(levels), packs=packs)
    task = Task(model, batches, loss, metric, optimizer, steps, seed)
    target = None if folder is None else Path(folder)
    if target is not None and not (target / files.JSON_FILE).exists() and any((target / f"{cast}.txt").exists() for cast in LISTS):
        raise HmpError(f"{target}: holds lists that tune() did not write and would replace; name another folder")
    functions = {"loss": loss, "metric": metric, "optimizer": optimizer}
    key = _key_of(task, decisions, functions, {"tolerance": bounds, "objective": objective, "seed": seed, "per_module": per_module})
    shows = shown(progress)
    journal = Journal(target, key, resume)
    if journal.result is not None:
        assert target is not None  # where it was read from
        result = replace(journal.result, folder=str(target))
        files.write(result, target)  # the lists may be gone, or changed
        return result
    trials = Trials(task, bounds, small, allowed, journal)
    search = Search(task, decisions, trials, journal, shows, key, target)
    try:
        with task.prepared(), in_force(begin):
            try:
                search.go()
                stopped: Stopped = "solved"
            except Over:
                stopped = "budget"
        return search.end(stopped)
    finally:
        shows.close()


def _start(start: Policy, levels: Collection[str], packs: bool) -> Policy:
    """The policy to begin with. HmpError for one with lists that a search writes."""
    if start.entries("fp8"):
        such = '"autocast"' + ("" if "fp8" in levels else ', and levels=("fp8", "bf16", "fp32")')
        raise HmpError(
            f"policy {start.name!r} has an FP8 list, which tune() would write anew; give one without it as start=, such as {such}"
        )
    if start.scoped:
        raise HmpError(f"policy {start.name!r} has scoped lines, which tune() would write anew; give one without them as start=")
    if packs and start.entries("saved"):
        raise HmpError(
            f'policy {start.name!r} has a saved list, which tune() would write anew; give one without it as start=, as "autocast"'
        )
    return start


def _in_fp8(levels: Collection[str]) -> bool:
    """Whether FP8 is one of the levels. HmpError for levels that cannot be searched."""
    if isinstance(levels, str) or set(levels) not in ({"bf16", "fp32"}, {"fp8", "bf16", "fp32"}):
        raise HmpError(f'levels={levels!r} cannot be searched; give ("bf16", "fp32") or ("fp8", "bf16", "fp32")')
    return "fp8" in levels


def _key_of(task: Task, decisions: Decisions, functions: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """What tells this search from others."""
    start = decisions.start
    hashed = {"model": identity.of_model(task.model), "data": identity.of_tensors(each_tensor(task.batches))}
    hashed |= {name: identity.of_function(given) for name, given in functions.items()}
    shown = {**settings, "steps": task.steps, "start": f"{start.name} {start.fingerprint}"}
    shown |= {"torch": torch.__version__, "device": task.device}
    shown["levels"] = f"fp8 ({start.fp8_recipe}, {start.fp8_kernel}), bf16, fp32" if decisions.in_fp8 else "bf16, fp32"
    return identity.of_search(hashed | {"choice of ops": sorted(decisions.ops)}, shown)
