"""The overhead of a single call with nothing to cast, of hmp, hmp switched off, torch.autocast and a closure that calls the op.

Operands are 8x8, so that the call takes all the time, on one thread, under no_grad. The clock is the thread's processor time, which other
processes do not count in. A side's figure in a round is its fastest stretch; its overhead is the median over rounds of the difference to
plain torch in the same round.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hmp
from hmp.compat import habana

from ..harness.results import Found, Row, at_most
from ..harness.sides import LOW, converted, policy_of, rotated
from ..harness.stats import Estimate, paired_difference, paired_ratio, ratio_of
from ..harness.timing import no_garbage_collection, one_thread

POLICY = "habana"
FUNCTIONS, METHODS = 1.6, 2.6  # times what a closure adds
SPELLED = 2.5  # times torch.autocast's
SIDES = ("plain", "closure", "hmp", "hmp off", "autocast")
# Where the loops below find their ops.
PLACES = (
    *((F, name) for name in ("linear", "layer_norm", "softmax")),
    *((torch, name) for name in ("matmul", "bmm", "addmm")),
    *((Tensor, name) for name in ("matmul", "__matmul__", "add_")),
)
STRETCH = 100

Loop = Callable[[range], None]


def loops() -> dict[str, Loop]:
    """Return a loop for each op, which calls it by its usual name, patched or not."""
    torch.manual_seed(0)
    x, w, b = torch.randn(8, 8).to(LOW), torch.randn(8, 8).to(LOW), torch.randn(8).to(LOW)
    batch, full, ones = torch.randn(1, 8, 8).to(LOW), torch.randn(8, 8), torch.ones(8, 8)

    def linear(calls: range) -> None:
        for _ in calls:
            F.linear(x, w, b)

    def matmul(calls: range) -> None:
        for _ in calls:
            torch.matmul(x, w)

    def method(calls: range) -> None:
        for _ in calls:
            x.matmul(w)

    def operator(calls: range) -> None:
        for _ in calls:
            x @ w

    def bmm(calls: range) -> None:
        for _ in calls:
            torch.bmm(batch, batch)

    def addmm(calls: range) -> None:
        for _ in calls:
            torch.addmm(b, x, w)

    def layer_norm(calls: range) -> None:
        for _ in calls:
            F.layer_norm(x, (8,), b, b)

    def softmax(calls: range) -> None:
        for _ in calls:
            F.softmax(full, -1)

    def add_in_place(calls: range) -> None:
        for _ in calls:
            full.add_(ones, alpha=-0.1)  # as an optimizer does

    return {
        "linear": linear,
        "matmul": matmul,
        "Tensor.matmul": method,
        "@": operator,
        "bmm": bmm,
        "addmm": addmm,
        "layer_norm": layer_norm,
        "softmax": softmax,
        "Tensor.add_": add_in_place,
    }


def _closure(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: op(*args, **kwargs)


@contextlib.contextmanager
def _closures() -> Iterator[None]:
    """Put a closure around each op inside the context."""
    before = [(owner, name, vars(owner).get(name)) for owner, name in PLACES]
    try:
        for owner, name in PLACES:
            setattr(owner, name, _closure(getattr(owner, name)))
        yield
    finally:
        for owner, name, function in before:
            if function is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, function)


@contextlib.contextmanager
def _on(side: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if side == "closure":
            stack.enter_context(_closures())
        elif side == "autocast":
            stack.enter_context(_region())
        elif side != "plain":
            stack.enter_context(converted(POLICY))
            if side == "hmp off":
                stack.enter_context(hmp.disable_casts())
        yield


def _nanoseconds(loop: Loop, calls: int) -> float:
    """Return one call's time, in nanoseconds, in the fastest stretch of `calls` calls."""
    stretch = range(min(STRETCH, calls))
    loop(stretch)
    best = float("inf")
    for _ in range(max(1, calls // STRETCH)):
        start = time.thread_time_ns()
        loop(stretch)
        best = min(best, (time.thread_time_ns() - start) / len(stretch))
    return best


def samples(rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Return nanoseconds a call, by op and side, one for each round."""
    ops = loops()
    found: dict[str, dict[str, list[float]]] = {name: {side: [] for side in SIDES} for name in ops}
    with one_thread(), torch.no_grad(), no_garbage_collection():
        for number in range(rounds):
            for side in rotated(list(SIDES), number):
                with _on(side):
                    for name, loop in ops.items():
                        found[name][side].append(_nanoseconds(loop, calls))
    return found


def hits(rounds: int, calls: int) -> Estimate:
    """Return the nanoseconds of a weight's copy in one context: `linear` with a float32 weight against one with a low-precision weight."""
    weight = torch.nn.Parameter(torch.randn(8, 8))
    x, low = torch.randn(8, 8).to(LOW), weight.detach().to(LOW)

    def kept(calls: range) -> None:
        for _ in calls:
            F.linear(x, weight)

    def nothing_to_cast(calls: range) -> None:
        for _ in calls:
            F.linear(x, low)

    found: dict[Loop, list[float]] = {kept: [], nothing_to_cast: []}
    with one_thread(), torch.no_grad(), no_garbage_collection(), hmp.casts(POLICY):
        for number in range(rounds):
            for loop in rotated(list(found), number):
                found[loop].append(_nanoseconds(loop, calls))
    return paired_difference(found[kept], found[nothing_to_cast])


def applied(rounds: int, calls: int) -> dict[str, Estimate]:
    """Return the nanoseconds that hmp.apply() adds to a call of an empty module, outside and inside an autocast context."""
    plain, marked = torch.nn.Identity(), hmp.apply(torch.nn.Identity(), POLICY)
    x = torch.randn(8, 8)

    def call_of(module: torch.nn.Module) -> Loop:
        def loop(calls: range) -> None:
            for _ in calls:
                module(x)

        return loop

    loops, regions = {"plain": call_of(plain), "applied": call_of(marked)}, {"outside": contextlib.nullcontext, "inside": _region}
    found: dict[str, dict[str, list[float]]] = {where: {side: [] for side in loops} for where in regions}
    with one_thread(), torch.no_grad(), no_garbage_collection():
        for number in range(rounds):
            for where in rotated(list(regions), number):
                with regions[where]():
                    for side in rotated(list(loops), number):
                        found[where][side].append(_nanoseconds(loops[side], calls))
    hmp.revert()
    return {where: paired_difference(sides["applied"], sides["plain"]) for where, sides in found.items()}


def mapped(rounds: int, calls: int) -> dict[str, tuple[Estimate, float]]:
    """Return the nanoseconds that a device map adds to calls with int64 of ops for which it accepts int32, and their time without it."""
    x, index, target = torch.randn(8, 8), torch.arange(8), torch.zeros(8, dtype=torch.int64)

    def cross_entropy(calls: range) -> None:
        for _ in calls:
            F.cross_entropy(x, target)

    def take(calls: range) -> None:
        for _ in calls:
            torch.take(x, index)

    loops = {"cross_entropy": cross_entropy, "take": take}
    found: dict[str, dict[str, list[float]]] = {name: {"plain": [], "mapped": []} for name in loops}
    with one_thread(), torch.no_grad(), no_garbage_collection():
        for number in range(rounds):
            for side in rotated(["plain", "mapped"], number):
                with habana.install("cpu") if side == "mapped" else contextlib.nullcontext():
                    for name, loop in loops.items():
                        found[name][side].append(_nanoseconds(loop, calls))
    return {name: (paired_difference(sides["mapped"], sides["plain"]), median(sides["plain"])) for name, sides in found.items()}


def recorded(rounds: int, calls: int) -> dict[str, Estimate]:
    """Return the nanoseconds that hmp.record() adds to a call of a listed op, and of an unlisted op."""
    x, w = torch.randn(8, 8).to(LOW), torch.randn(8, 8).to(LOW)

    def linear(calls: range) -> None:
        for _ in calls:
            F.linear(x, w)

    def cumsum(calls: range) -> None:
        for _ in calls:
            torch.cumsum(x, 0)

    loops = {"linear": linear, "cumsum, which no list decides": cumsum}
    found: dict[str, dict[str, list[float]]] = {name: {"plain": [], "recorded": []} for name in loops}
    with one_thread(), torch.no_grad(), no_garbage_collection(), converted(POLICY):
        for number in range(rounds):
            for side in rotated(["plain", "recorded"], number):
                with hmp.record() if side == "recorded" else contextlib.nullcontext():
                    for name, loop in loops.items():
                        found[name][side].append(_nanoseconds(loop, calls))
    return {name: paired_difference(sides["recorded"], sides["plain"]) for name, sides in found.items()}


def unlisted(rounds: int, calls: int) -> dict[str, Estimate]:
    """Nanoseconds that a saved list adds to a call of `linear` with a gradient: one that names another op, and one that names it, where
    nothing is large enough to be packed."""
    x, w = torch.randn(8, 8).to(LOW), torch.randn(8, 8).to(LOW).requires_grad_()
    lists = {"no list": frozenset(), "on no list": frozenset({"gelu"}), "listed, nothing to pack": frozenset({"linear"})}
    policies = {side: hmp.Policy.load(POLICY).replace(saved=ops) for side, ops in lists.items()}

    def linear(calls: range) -> None:
        for _ in calls:
            F.linear(x, w)

    found: dict[str, list[float]] = {side: [] for side in policies}
    with one_thread(), no_garbage_collection():
        for number in range(rounds):
            for side in rotated(list(policies), number):
                with converted(policies[side]):
                    found[side].append(_nanoseconds(linear, calls))
    return {side: paired_difference(found[side], found["no list"]) for side in policies if side != "no list"}


def spellings() -> dict[str, Callable[[], Any]]:
    """Return calls as programs spell them, with keywords, into another tensor or by index, of small tensors that have to be cast or not."""
    torch.manual_seed(0)
    x, w, b, p = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8), torch.nn.Parameter(torch.randn(8, 8))
    low, out, buffer = x.to(LOW), torch.empty(8, 8, dtype=LOW), torch.zeros(8, 8, 8)
    query, image, kernel = torch.randn(1, 2, 8, 8), torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)
    target, mask = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 8, dtype=torch.bool)
    return {
        "linear(input=, weight=, bias=)": lambda: F.linear(input=x, weight=w, bias=b),
        "layer_norm(weight=, bias=)": lambda: F.layer_norm(x, (8,), weight=b, bias=b),
        "cross_entropy(reduction=)": lambda: F.cross_entropy(x, target, reduction="mean"),
        "clamp(min=)": lambda: torch.clamp(low, min=0.0),
        "scaled_dot_product_attention(is_causal=)": lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True),
        "conv2d(padding=)": lambda: F.conv2d(image, kernel, padding=1),
        "b[:, 1] = x": lambda: buffer.__setitem__((slice(None), 1), x),
        "mm(out=)": lambda: torch.mm(low, low, out=out),
        "F.pad": lambda: F.pad(low, (1, 1)),
        "x @ parameter": lambda: x @ p,
        "where": lambda: torch.where(mask, low, low),
        "masked_fill": lambda: low.masked_fill(mask, -1e9),
    }


def spelled(rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Return nanoseconds a call, by spelling and side, under torch.autocast and under hmp with the same lists, one for each round."""

    def loop_of(call: Callable[[], Any]) -> Loop:
        def loop(calls: range) -> None:
            for _ in calls:
                call()

        return loop

    loops = {name: loop_of(call) for name, call in spellings().items()}
    sides: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "autocast": _region, "hmp": lambda: hmp.casts(policy_of("cpu"), dtype=LOW)
    }  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {name: {side: [] for side in sides} for name in loops}
    with one_thread(), torch.no_grad(), no_garbage_collection():
        for number in range(rounds):
            for side in rotated(list(sides), number):
                with sides[side]():
                    for name, loop in loops.items():
                        found[name][side].append(_nanoseconds(loop, calls))
    hmp.revert()
    return found


def _region() -> torch.autocast:
    return torch.autocast("cpu", dtype=LOW)


def _places() -> list[Any]:
    return [vars(owner).get(name, owner) for owner, name in PLACES]


def untouched() -> bool:
    """Return True if convert() and revert() leave the same objects in the places of the ops."""
    before = _places()
    with converted(POLICY):
        changed = any(a is not b for a, b in zip(before, _places(), strict=True))
    return changed and all(a is b for a, b in zip(before, _places(), strict=True))


def _mean(ratios: list[Estimate]) -> Estimate:
    """Return the arithmetic mean, with its noise: of a single round one may be below 0."""
    noise = math.hypot(*(ratio.noise for ratio in ratios)) / len(ratios)
    return Estimate(fmean(ratio.value for ratio in ratios), noise, min(ratio.rounds for ratio in ratios))


def run(rounds: int, calls: int) -> Found:
    """Return the rows about single calls, and each op's figures."""
    found = Found("calls")
    found.details = [
        f"nanoseconds, policy {POLICY}, nothing to cast, one thread, medians of {rounds} rounds; (in brackets: of the minima)",
        f"{'call':26} {'plain':>7}   " + "".join(f"{'+' + side:>16}" for side in SIDES[1:]) + f"{'hmp / closure':>16} {'off / same':>16}",
    ]
    on: dict[str, Estimate] = {}
    off: dict[str, Estimate] = {}
    found.samples = samples(rounds, calls)
    for name, sides in found.samples.items():
        plain = sides["plain"]
        added = {side: paired_difference(sides[side], plain) for side in SIDES[1:]}
        on[name], off[name] = ratio_of(added["hmp"], added["closure"]), ratio_of(added["hmp off"], added["closure"])
        cells = "".join(f"{added[side].value:+8.0f} ({min(sides[side]) - min(plain):+4.0f})" for side in SIDES[1:])
        found.details.append(f"{name:26} {median(plain):7.0f}   {cells}   {on[name].text(2):>14} {off[name].text(2):>16}")
    for where, ratios in (("inside disable_casts()", off), ("that looks at each input's dtype", on)):
        for kind, target in (("functions", FUNCTIONS), ("methods and operators", METHODS)):
            of_kind = {name: ratio for name, ratio in ratios.items() if name.startswith(("Tensor.", "@")) is (kind != "functions")}
            mean, worst = _mean(list(of_kind.values())), max(of_kind, key=lambda name: of_kind[name].value)
            text = f"{mean.text(2)}; worst {of_kind[worst].text(2)} ({worst})"
            found.rows.append(at_most(f"a call {where}, time added / by a closure: {kind}", target, mean, text))
    found.rows.append(Row("a weight's copy used again, time added to linear", "-", f"{hits(rounds, calls).text(0)} ns", None))
    added = applied(rounds, calls)
    result = f"{added['outside'].text(0)} ns; inside a region of torch.autocast, which is off meanwhile (R17), {added['inside'].text(0)} ns"
    found.rows.append(Row("call of a model with hmp.apply(), time added", "-", result, None))
    figures = ", ".join(f"{name} {added.text(0)} ns of {plain:.0f}" for name, (added, plain) in mapped(rounds, calls).items())
    found.rows.append(Row("call with int64 under a device map, time added", "-", figures, None))
    figures = ", ".join(f"{name} {added.text(0)} ns" for name, added in recorded(rounds, calls).items())
    found.rows.append(Row("call under hmp.record(), time added", "-", figures, None))
    figures = ", ".join(f"linear {side} {added.text(0)} ns" for side, added in unlisted(rounds, calls).items())
    found.rows.append(Row("call under a saved list, time added", "0 for an op on no list", figures, None))
    usual = spelled(rounds, calls)
    times = {name: paired_ratio(sides["hmp"], sides["autocast"]) for name, sides in usual.items()}
    found.samples |= {f"spelled {name}": sides for name, sides in usual.items()}
    found.details += ["nanoseconds, the lists of torch.autocast on the CPU, medians"] + [
        f"{name:42} autocast {median(sides['autocast']):7.0f}   hmp {median(sides['hmp']):7.0f}   ratio {times[name].text(2)}"
        for name, sides in usual.items()
    ]
    worst = max(times, key=lambda name: times[name].value)
    what = "a call as usually spelled, time / torch.autocast's, the worst"
    found.rows.append(at_most(what, SPELLED, times[worst], f"{times[worst].text(2)} ({worst})"))
    same = untouched()
    found.rows.append(Row("after revert()", "the same objects", "the same objects" if same else "other objects", same))
    if not same:
        found.failures.append("after revert() other objects stand in torch's places")
    return found
