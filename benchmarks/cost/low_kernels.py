"""Low precision on a processor without instructions for it: torch's kernels, and float32 products of rounded inputs, over float32.

`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` has torch and oneDNN run the kernels of a processor without such instructions. The first
table is what SLOW_WITHOUT_INSTRUCTIONS of hmp/core/ops/table.py was chosen by; the second is of training steps and of inference.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import hmp
from hmp.core.ops import sites, table
from hmp.core.rules.emulation import computed_in_float32

from ..harness.results import Found, Row, at_most
from ..harness.sides import Side
from ..harness.stats import Estimate, estimate, paired_ratio
from ..harness.timing import OWN, one_thread, step_seconds, steps_for
from ..workloads import by_op, small

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TRAINING, OF_AUTOCAST, INFERENCE, ERROR, BYTES = 1.6, 1 / 3, 1.3, 1.1, 2.2


# --- single ops -----------------------------------------------------------------------------------------------------------


def _times(run: Callable[[tuple[Tensor, ...]], Tensor], tensors: tuple[Tensor, ...], trains: bool, rounds: int) -> list[float]:
    given = tuple(t.detach().requires_grad_(trains) for t in tensors)

    def step() -> None:
        if trains:
            result = run(given)
            result.backward(torch.ones_like(result))  # of sum() the gradient would be an expanded number
        else:
            with torch.no_grad():
                run(given)

    return [step_seconds(step, steps_for(0.02, step, "cpu", 3), "cpu", OWN) for _ in range(rounds)]


def _rounded(call: by_op.Call, low: torch.dtype, tensors: tuple[Tensor, ...]) -> Tensor:
    return call.run(tuple(t.to(low).float() for t in tensors)).to(low)


def ratios(call: by_op.Call, low: torch.dtype, rounds: int) -> dict[str, float]:
    """Return, to float32's time, that of the kernel and that of float32 with rounded inputs: forward alone, and with backward."""
    found = {}
    for name, trains in (("forward", False), ("training", call.op not in by_op.WITHOUT_DERIVATIVE)):
        if name == "training" and not trains:
            found |= {"kernel, training": math.nan, "rounded, training": math.nan}
            continue
        base = min(_times(call.run, call.tensors, trains, rounds))
        in_low = tuple(t.to(low) for t in call.tensors)
        found[f"kernel, {name}"] = min(_times(call.run, in_low, trains, rounds)) / base
        found[f"rounded, {name}"] = min(_times(partial(_rounded, call, low), call.tensors, trains, rounds)) / base
    return found


def of_ops(rounds: int, smallest: bool) -> Found:
    """Return the table of single ops."""
    found = Found("low_kernels, single ops")
    columns = [f"{side}, {task}" for task in ("forward", "training") for side in ("kernel", "rounded")]
    found.details = [
        "single ops, to float32's time: torch's kernel for the dtype, and float32 with rounded inputs and a rounded result",
        f"{'op':30} {'dtype':9} " + " ".join(f"{each:>18}" for each in columns) + "  computes in",
    ]
    for call in by_op.calls():
        slow = not table.SLOW_WITHOUT_INSTRUCTIONS.isdisjoint(sites.ancestry(call.op))
        for name, low in LOW.items():
            of_call = ratios(call, low, rounds)
            found.samples[f"{call.op} {name}"] = of_call
            times = " ".join(f"{of_call[each]:18.2f}" for each in columns)
            found.details.append(f"{call.op:30} {name:9} {times}  {'float32' if slow else 'its own kernel'}")
        if smallest:
            break
    return found


# --- models ---------------------------------------------------------------------------------------------------------------


MODELS: dict[str, small.Make] = {
    "attention d 128": partial(small.attention, 128),
    "attention d 384": partial(small.attention, 384),
    "mlp, 6 x 256": partial(small.mlp, 256),
    "convolutions, 32 channels": partial(small.convolutions, 32),
    "LSTM 128": partial(small.recurrent, "LSTM", 128),
    "GRU 128": partial(small.recurrent, "GRU", 128),
    "LSTMCell 128": partial(small.cells, "LSTMCell", 128),
    "GRUCell 128": partial(small.cells, "GRUCell", 128),
}


@contextlib.contextmanager
def _computing(policy: hmp.Policy, kernels: str) -> Iterator[None]:
    before = hmp.low_kernels.set_low_kernels(kernels)
    try:
        with hmp.convert(policy=policy):
            yield
    finally:
        hmp.low_kernels.set_low_kernels(before)


def sides(low: torch.dtype) -> dict[str, Side]:
    """Return float32, hmp with float32 products of rounded inputs, and torch.autocast."""
    policy = hmp.Policy.load("torch-cpu").replace(dtype=low)
    return {
        "float32": Side("float32"),
        "hmp": Side("hmp", visit=lambda: _computing(policy, "float32")),
        "autocast": Side("autocast", region=lambda: torch.autocast("cpu", dtype=low)),
    }


def of_models(rounds: int, seconds: float, smallest: bool) -> Found:
    """Return rows and table of whole steps."""
    found = Found("low_kernels")
    there = ", ".join(name for name, low in LOW.items() if low not in computed_in_float32()) or "none"
    sides_of = f"{'training: hmp':>15} {'autocast':>15} {'inference: hmp':>15} {'autocast':>15}"
    found.details = [
        f"whole steps, to float32's time; instructions: {there}; hmp computes in float32 on rounded inputs",
        f"{'model':27} {'dtype':9} {sides_of} {'error':>6} {'bytes':>6}",
    ]
    for title, make in MODELS.items():
        for name, low in LOW.items():
            _of_model(found, title, name, small.Task(make), sides(low), rounds, seconds)
        if smallest:
            break
    return found


def _of_model(found: Found, title: str, dtype: str, task: small.Task, among: dict[str, Side], rounds: int, seconds: float) -> None:
    try:
        task.train(among["autocast"])
    except RuntimeError as error:  # oneDNN's restricted kernels have no recurrent op in low precision
        del among["autocast"]
        found.details.append(f"{title}, {dtype}: torch.autocast raises {str(error).splitlines()[0][:90]}")
    trained, inferred = (small.seconds_of(step, among, rounds, seconds) for step in (task.train, task.infer))
    to_float32 = {
        (name, side): paired_ratio(samples[side], samples["float32"])
        for name, samples in (("training", trained), ("inference", inferred))
        for side in among
    }
    exact = task.gradients(among["float32"])
    errors = {name: float((task.gradients(side) - exact).norm() / exact.norm()) for name, side in among.items()}
    kept = {name: task.kept(side) for name, side in among.items()}
    with_autocast = "autocast" in among
    error = errors["hmp"] / errors["autocast"] if with_autocast else math.nan
    share = kept["hmp"] / kept["autocast"] if with_autocast else math.nan
    unknown = estimate([math.nan])
    found.details.append(
        f"{title:27} {dtype:9} {to_float32['training', 'hmp'].text(2):>15} {to_float32.get(('training', 'autocast'), unknown).text(2):>15}"
        f" {to_float32['inference', 'hmp'].text(2):>15} {to_float32.get(('inference', 'autocast'), unknown).text(2):>15}"
        f" {error:6.2f} {share:6.3f}"
    )
    found.samples[f"{title} {dtype}"] = {"training": trained, "inference": inferred, "errors": errors, "kept": kept}
    about = f"{title}, {dtype}, float32 products of rounded inputs"
    found.rows += [_row(f"{about}: training / float32", TRAINING, to_float32["training", "hmp"])]
    found.rows += [_row(f"{about}: inference / float32", INFERENCE, to_float32["inference", "hmp"])]
    if with_autocast:
        figure = paired_ratio(trained["hmp"], trained["autocast"])
        row = _row(f"{about}: training / torch.autocast", OF_AUTOCAST, figure)
        found.rows += [
            row if LOW[dtype] in computed_in_float32() else replace(row, target="- (has instructions)", met=None, within_noise=False)
        ]
        found.rows += [Row(f"{about}: error of the gradients / torch.autocast's", f"≤ {ERROR:.2f}", f"{error:.3f}", error <= ERROR)]
        found.rows += [Row(f"{about}: bytes kept for backward / torch.autocast's", f"≤ {BYTES:.2f}", f"{share:.3f}", share <= BYTES)]


def _row(what: str, limit: float, figure: Estimate) -> Row:
    return at_most(what, limit, figure, figure.text())


def run(rounds: int, seconds: float, smallest: bool = False) -> Found:
    """Return the rows about low precision without instructions, of one thread."""
    with one_thread():
        found, single = of_models(rounds, seconds, smallest), of_ops(1 if smallest else 2, smallest)
    return Found("low_kernels", found.rows, [*found.details, "", *single.details], {**found.samples, "ops": single.samples})
