"""Training steps that use weights many times: bytes saved for backward, time, gradients' error to float64 and casts of weights, against
torch.autocast and torch.autocast(cache_enabled=False), which casts for each use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

import hmp
from hmp.tools.saved_activations import saved_by

from ..harness.results import Found, Row
from ..harness.sides import LOW, Side, autocast, policy_of, rotated
from ..harness.stats import Estimate, geometric_mean, paired_ratio
from ..harness.timing import step_seconds, steps_for
from ..workloads.reused import Reused, cases, over_steps

NETS, STEPS = ("GRUCell", "nn.GRU"), (10, 20, 50, 100, 200, 500, 1000)  # of the curve
BYTES, BYTES_OF_CELLS, TIME, TIME_OF_EACH, ERROR = 1.00, 1.02, 1.05, 1.10, 1.10


@dataclass(frozen=True)
class Figures:
    """Of one workload: hmp's bytes and time over torch.autocast's, the error of each side, and how often each casts a weight."""

    bytes: float
    time: Estimate
    errors: dict[str, float]
    casts: dict[str, int]

    @property
    def error(self) -> float:
        """Return hmp's error over that of a cast for each use."""
        return self.errors["hmp"] / self.errors["each"]


def sides(device: str) -> tuple[Side, Side, Side]:
    """Return hmp, torch.autocast, and torch.autocast without its cache."""
    each = Side("each", region=lambda: torch.autocast(device, dtype=LOW, cache_enabled=False))
    # as torch.autocast's, a context around the step: a copy lives as long
    return Side("hmp", region=lambda: hmp.casts(policy_of(device))), autocast(device), each


def _step(case: Reused, side: Side) -> None:
    side.run(case.loss).backward()
    # in place, as an optimizer writes: the next step's copies are new ones
    with torch.no_grad():
        torch._foreach_mul_(list(case.model.parameters()), 1.0)
    case.model.zero_grad(set_to_none=True)


def _gradients(case: Reused, side: Side) -> torch.Tensor:
    case.model.zero_grad(set_to_none=True)
    with side.visit():
        side.run(case.loss).backward()
    vector = torch.cat([p.grad.double().flatten() for p in case.model.parameters() if p.grad is not None])
    case.model.zero_grad(set_to_none=True)
    return vector


def errors_of(case: Reused, among: Iterable[Side]) -> dict[str, float]:
    """Return the distance of each side's gradients from float64's, relative to their norm."""
    exact = _gradients(case.exact(), Side("float64"))
    return {side.name: float((_gradients(case, side) - exact).norm() / exact.norm()) for side in among}


def curve(device: str, steps: Iterable[int] = STEPS) -> dict[str, dict[str, dict[str, float]]]:
    """Return the gradients' error of recurrent nets, by net, number of steps and side."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for net in NETS:
        for count in steps:
            case = over_steps(net.removeprefix("nn."), count).to(device)
            found.setdefault(net, {})[str(count)] = errors_of(case, sides(device))
    return found


def saved_bytes(case: Reused, side: Side) -> int:
    """Return the bytes that a forward pass in the middle of training saves for backward."""
    with side.visit():
        for _ in range(2):
            _step(case, side)
        return saved_by(lambda: side.run(case.loss), [*case.model.parameters(), *case.model.buffers()])


def casts_of_weights(case: Reused, side: Side) -> int:
    """Return the number of tensors of a weight's shape that a forward pass in the middle of training casts."""
    shapes = {tuple(p.shape) for p in case.model.parameters() if p.dim() > 1}
    with side.visit():
        for _ in range(2):
            _step(case, side)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiled:
            side.run(case.loss)
    events = [event for event in profiled.events() if event.name == "aten::_to_copy"]
    return sum(tuple(event.input_shapes[0]) in shapes for event in events)


def measure(case: Reused, device: str, rounds: int, seconds: float) -> Figures:
    """Return the figures of one workload."""
    case.to(device).model.train()
    three = sides(device)
    hmp_side, theirs, _ = three
    errors = errors_of(case, three)
    casts = {side.name: casts_of_weights(case, side) for side in three}
    kept = saved_bytes(case, hmp_side) / saved_bytes(case, theirs)
    samples: dict[str, list[float]] = {side.name: [] for side in (hmp_side, theirs)}
    steps = 0
    for number in range(rounds):
        for side in rotated([hmp_side, theirs], number):
            with side.visit():
                step = functools.partial(_step, case, side)
                step()
                steps = steps or steps_for(seconds, step, device, 3)
                samples[side.name].append(step_seconds(step, steps, device))
    return Figures(kept, paired_ratio(samples["hmp"], samples["autocast"]), errors, casts)


def run(rounds: int, seconds: float, device: str, smallest: bool = False) -> Found:
    """Return the rows about weights that are used many times."""
    found = Found("reused")
    found.details = [
        "weights used again; bytes and time: hmp / torch.autocast; error of the gradients to float64; casts of weights in a forward pass",
        f"{'training step':40} {'bytes':>6} {'time':>15} {'error: hmp':>11} {'autocast':>9} {'each use':>9} {'casts: hmp':>11}"
        f" {'autocast':>9}",
    ]
    measured: dict[str, Figures] = {}
    cells: set[str] = set()
    with contextlib.closing(cases()) as each:
        for case in each:
            figures = measured[case.title] = measure(case, device, rounds, seconds)
            if case.family == "cell":
                cells.add(case.title)
            errors, casts = figures.errors, figures.casts
            found.details.append(
                f"{case.title:40} {figures.bytes:6.3f} {figures.time.text():>15} {errors['hmp']:11.4f} {errors['autocast']:9.4f}"
                f" {errors['each']:9.4f} {casts['hmp']:11} {casts['autocast']:9}"
            )
            found.samples[case.title] = {
                "bytes": figures.bytes, "time": figures.time.value, "noise": figures.time.noise, "errors": errors, "casts": casts
            }  # fmt: skip
            if smallest and len(measured) == 2:
                break
    found.rows = _rows(measured, cells)
    over = found.samples["errors over steps"] = curve(device, STEPS[:2] if smallest else STEPS)
    found.details += ["", f"{'error of the gradients over steps':40} {'hmp':>9} {'autocast':>9} {'each use':>9}"]
    for net, by_steps in over.items():
        for count, errors in by_steps.items():
            each_side = f"{errors['hmp']:9.4f} {errors['autocast']:9.4f} {errors['each']:9.4f}"
            found.details.append(f"{f'{net} 32 to 64, {count} steps':40} {each_side}")
    found.opening["reused"] = _opening(measured, over)
    return found


def _opening(measured: dict[str, Figures], over: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return its sentence of the opening of RESULTS.md."""
    times, most = [of.time.value for of in measured.values()], max(of.bytes for of in measured.values())
    (net, by_steps) = next(iter(over.items()))
    longest = list(by_steps)[-1]
    errors = by_steps[longest]
    return (
        f"of {len(measured)} training steps none keeps more than {most:.3f} of torch.autocast's bytes for backward, and they take"
        f" {geometric_mean(times):.3f} of its time, {min(times):.3f} to {max(times):.3f}. After {longest} steps of a {net} whose steps all"
        f" pull one way the gradients are {100 * errors['hmp']:.2f} % off float64's, under torch.autocast {100 * errors['autocast']:.2f} %."
    )


def _rows(measured: dict[str, Figures], cells: set[str]) -> list[Row]:
    what = "weights used again, hmp / torch.autocast"
    over = {title: of.bytes / (BYTES_OF_CELLS if title in cells else BYTES) for title, of in measured.items()}
    heaviest = max(over, key=over.__getitem__)
    times = [of.time.value for of in measured.values()]
    slowest = max(measured, key=lambda title: measured[title].time.value)
    worst = max(measured, key=lambda title: measured[title].error)
    more = [title for title, of in measured.items() if of.casts["hmp"] > of.casts["autocast"]]
    mean = geometric_mean(times)
    return [
        Row(
            f"{what}: bytes kept for backward, none above",
            f"≤ {BYTES:.2f}, cells ≤ {BYTES_OF_CELLS}",
            f"worst {measured[heaviest].bytes:.3f} ({heaviest})",
            round(over[heaviest], 3) <= 1,
        ),
        Row(f"{what}: time, geometric mean of {len(times)}", f"≤ {TIME}", f"{mean:.3f}", mean <= TIME),
        Row(
            f"{what}: time, none above",
            f"≤ {TIME_OF_EACH:.2f}",
            f"worst {measured[slowest].time.text()} ({slowest})",
            not measured[slowest].time.above(TIME_OF_EACH),
        ),
        Row(
            "weights used again: gradients' error, hmp / a cast for each use, none above",
            f"≤ {ERROR:.2f}",
            f"worst {measured[worst].error:.3f} ({worst})",
            measured[worst].error <= ERROR,
        ),
        Row(
            f"{what}: casts of weights, none above",
            "≤ 1",
            f"more in {len(more)} of {len(times)}" + (f": {more[0]}" if more else ""),
            not more,
        ),
    ]
