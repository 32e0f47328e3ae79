"""The overhead of hmp in an optimizer's step and zero_grad, with many small parameters, so that calls take most of the time.

hmp is measured twice: with the policy active around the step, and inside disable_casts(), as users of convert() write it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from statistics import median

import torch

import hmp

from ..harness.results import Found, at_most
from ..harness.sides import Side, converted, plain, rotated, under_hmp
from ..harness.stats import Estimate, mean_ratio, paired_ratio
from ..harness.timing import OWN, one_thread, step_seconds, steps_for

POLICY, TARGET = "habana", 1.05
LAYERS, WIDTH = 48, 32
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters, **how: torch.optim.SGD(parameters, lr=1e-6, **how),
    "SGD, momentum": lambda parameters, **how: torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, **how),
    "Adam": lambda parameters, **how: torch.optim.Adam(parameters, lr=1e-6, **how),
    "AdamW": lambda parameters, **how: torch.optim.AdamW(parameters, lr=1e-6, **how),
}
Act = Callable[[], object]
_set_gradient = torch._C.TensorBase.grad.__set__  # as backward() does: not through torch.Tensor.grad, which hmp patches


@contextlib.contextmanager
def _converted_and_off() -> contextlib.AbstractContextManager[None]:
    with converted(POLICY), hmp.disable_casts():
        yield


SIDES = (plain(), under_hmp(POLICY), Side("hmp off", visit=_converted_and_off))


def acts(device: str) -> dict[str, dict[str, Act]]:
    """Return the functions to time, by kind and name. Steps leave gradients as they are, so that every step does the same."""
    found: dict[str, dict[str, Act]] = {"optimizer step": {}, "zero_grad": {}}
    for foreach in (False, True):
        how = "foreach" if foreach else "one by one"
        for name, make in OPTIMIZERS.items():
            found["optimizer step"][f"{name}, {how}"] = make(_parameters(device), foreach=foreach).step
        zeroed = make(_parameters(device), foreach=foreach)
        found["zero_grad"][f"to zero, {how}"] = lambda zeroed=zeroed: zeroed.zero_grad(set_to_none=False)
    parameters = _parameters(device)
    dropping = torch.optim.SGD(parameters, lr=1e-6)
    gradients = [parameter.grad for parameter in parameters]

    def drop() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            _set_gradient(parameter, gradient)
        dropping.zero_grad()

    found["zero_grad"]["to none"] = drop
    return found


def _parameters(device: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    shapes = [shape for _ in range(LAYERS) for shape in ((WIDTH, WIDTH), (WIDTH,))]
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def samples(act: Act, rounds: int, seconds: float, device: str) -> dict[str, list[float]]:
    """Return the seconds of a function on every side, one for each round."""
    found: dict[str, list[float]] = {side.name: [] for side in SIDES}
    act()  # an optimizer makes its state at its first step
    count = steps_for(seconds, act, device, OWN.least)
    for number in range(rounds):
        for side in rotated(list(SIDES), number):
            with side.visit():
                found[side.name].append(step_seconds(act, count, device, OWN))
    return found


def run(rounds: int, seconds: float, device: str) -> Found:
    """Return the rows about optimizers, each of the slowest one."""
    found = Found("optimizers")
    found.details = [
        f"{2 * LAYERS} parameters, {WIDTH} wide, policy {POLICY}, one thread; microseconds, medians of {rounds} rounds",
        f"{'':15} {'':30} {'plain':>9} {'hmp':>9} {'hmp off':>9} {'hmp / plain':>16} {'hmp off / plain':>16}",
    ]
    with one_thread():
        for kind, named in acts(device).items():
            ratios: dict[str, dict[str, Estimate]] = {"hmp": {}, "hmp off": {}}
            for name, act in named.items():
                taken = found.samples[f"{kind}: {name}"] = samples(act, rounds, seconds, device)
                for side, of in ratios.items():
                    of[name] = paired_ratio(taken[side], taken["plain"])
                times = "".join(f" {1e6 * median(taken[side.name]):9.1f}" for side in SIDES)
                both = "".join(f" {of[name].text():>16}" for of in ratios.values())
                found.details.append(f"{kind:15} {name:30}{times}{both}")
            for side, where in (("hmp off", "hmp inside disable_casts()"), ("hmp", "hmp")):
                worst = max(ratios[side], key=lambda name, side=side: ratios[side][name].value)
                mean = mean_ratio(list(ratios[side].values()))
                result = f"worst {ratios[side][worst].text()} ({worst}), geometric mean {mean.text()}"
                found.rows.append(at_most(f"{kind}, {where} / plain torch: worst of {len(named)}", TARGET, ratios[side][worst], result))
    return found
