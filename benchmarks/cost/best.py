"""The best lists for a model among all presets and the lists that `benchmarks.tuning` found, trained for a few steps at one size.

The fastest lists whose loss stays close to float32's are chosen. They are then measured on other steps than they were chosen by.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

import hmp
from hmp.core.casting import dtype_name

from ..harness import verify
from ..harness.sides import LOW, Side, autocast, plain, policy_of, under_hmp
from ..workloads import models
from ..workloads.models import Case

# A mean loss of the first steps may be this far from float32's, relative; the tuning's tolerance for losses is the same.
TOLERANCE = 0.02
LEARNING_RATE = 1e-3
TUNED = Path(__file__).resolve().parents[1] / "results" / "tuning.json"


@dataclass(frozen=True)
class Run:
    """The first steps of a training run: the shortest time of one, and their mean loss."""

    seconds: float
    loss: float

    def apart(self, reference: Run) -> float:
        """Return the relative distance of its loss from the reference's, infinite if the loss is not finite."""
        return abs(self.loss - reference.loss) / reference.loss if math.isfinite(self.loss) else math.inf


@dataclass(frozen=True)
class Choice:
    """The chosen lists, and all that were tried."""

    lists: str
    policy: hmp.Policy | str
    tried: dict[str, Run]
    float32: Run
    size: str

    def __str__(self) -> str:
        """Return each list with its time and the distance of its loss from float32's."""
        tried = [f"{name} {1000 * run.seconds:.2f} ms {100 * run.apart(self.float32):.2f} %" for name, run in self.tried.items()]
        return f"{self.lists}; of " + ", ".join(tried)


def candidates(name: str, device: str) -> dict[str, hmp.Policy | str]:
    """torch.autocast's lists for the device, Habana's, those that were tuned, and the other presets; none of another device or release,
    nor FP8, which is emulated where there is no such kernel."""
    first = [policy_of(device), "habana", "habana-o2"]
    others = [preset for preset in hmp.policies() if preset not in (*first, "autocast", "fp8") and not preset.startswith("torch-")]
    return {**{preset: preset for preset in first}, **tuned(name), **{preset: preset for preset in others}}


def tuned(name: str, committed: Path = TUNED) -> dict[str, hmp.Policy]:
    """Return the tuned lists for the task of a model's name, for time and for bytes, if they run anything in low precision."""
    tasks = json.loads(committed.read_text(encoding="utf-8"))["tasks"]
    found = {}
    for objective, searched in next((task["searches"] for task in tasks if task["name"] == name), {}).items():
        if searched["low"]:
            found[f"tuned for {objective}"] = hmp.Policy.from_dict(searched["policy"])
    return found


def trained(case: Case, side: Side, steps: int) -> Run:
    """Train the model for `steps` steps with AdamW."""
    with side.visit():
        return _trained(case, side, steps)


def _trained(case: Case, side: Side, steps: int) -> Run:
    case.model.train()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=LEARNING_RATE)
    losses, times = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(case.step(optimizer, side.run).item())  # reading a number waits for a device
        times.append(time.perf_counter() - start)
    return Run(min(times), fmean(losses))


def choose(name: str, size: str, device: str, steps: int, of: int = 100) -> Choice:
    """Return the fastest of the first `of` lists whose loss stays close to float32's, else torch.autocast's own.

    Lists are skipped if the model computes as under earlier ones, or in float32 throughout.
    """
    float32 = trained(models.build(name, size, device), plain(), steps)
    tried: dict[str, Run] = {}
    policies = dict(itertools.islice(candidates(name, device).items(), of))
    seen: list[verify.Ran] = []
    for lists, policy in policies.items():
        side = under_hmp(policy)
        looked_at, case = (models.build(name, size, device) for _ in range(2))
        with side.visit():
            ran = verify.recorded(side, looked_at.loss)
            if ran not in seen and any(dtype_name(LOW) in dtypes for _, dtypes in ran):
                seen.append(ran)
                tried[lists] = _trained(case, side, steps)
    fitting = [lists for lists, run in tried.items() if run.apart(float32) <= TOLERANCE]
    best = min(fitting, key=lambda lists: tried[lists].seconds, default=policy_of(device))
    return Choice(best, policies[best], tried, float32, size)


def losses_apart(name: str, size: str, device: str, policy: hmp.Policy | str, steps: int) -> dict[str, float]:
    """Return the distance of the first steps' mean loss from float32's, under the policy and under torch.autocast."""
    sides = {"float32": plain(), "best": under_hmp(policy), "autocast": autocast(device)}
    runs = {key: trained(models.build(name, size, device), side, steps) for key, side in sides.items()}
    return {key: runs[key].apart(runs["float32"]) for key in ("best", "autocast")}
