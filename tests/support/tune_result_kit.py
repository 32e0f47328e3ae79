"""What a search may have found, made by hand: every reason that a list can give is in it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hmp
from hmp.tools.tune.result import Tolerance, Trial, TuneResult, Unit

NASTY = "<script>alert(1)</script>"
MS = 1e-3


def unit(op: str, module: str | None = None, **measured: Any) -> Unit:
    values = {
        "level": "bf16",
        "calls": 24,
        "gain": 3.1 * MS,
        "of": 9 * MS,
        "gains": "seconds",
        "error": 1.2e-3,
        "change": 1e-4,
        "why": "chosen",
    }
    return Unit(op, module, **(values | measured))


def trial(name: str, low: tuple[str, ...], **measured: Any) -> Trial:
    """A trial within the tolerance, but for what is given."""
    values = {
        "loss": 2.0, "loss_change": 0.0, "metric": None, "metric_change": None, "seconds": 25 * MS,
        "saved_bytes": 5 * 2**20, "fits": True,
    }  # fmt: skip
    return Trial(name, hmp.Policy(name), {"bf16": low}, **(values | measured))


UNITS = (
    unit("linear"),
    unit("matmul", calls=1, gain=1 * MS, of=2 * MS, change=1e-6),
    unit("softmax", change=0.032, gain=0.5 * MS, of=1 * MS, calls=2, why="exceeds the tolerance"),
    unit("layer_norm", gain=-0.2 * MS, of=1 * MS, why="gains nothing"),
    unit("gelu", gain=0.3 * MS, of=1 * MS, why="no gain"),
    unit("log", gain=0.05 * MS, of=0.1 * MS, why="gains too little"),
    unit("exp", error=math.inf, change=math.inf, gain=0.0, of=0.0, why="gives NaN or Inf"),
    unit("cdist", error=math.inf, change=math.inf, gain=0.0, of=0.0, why="cannot run: no kernel"),
    unit("add", gain=0.01 * MS, of=0.1 * MS, why="not tried"),
)
POLICY = hmp.Policy(
    "tuned",
    bf16={"linear", "matmul", "mm", "conv2d"},
    fp32={"softmax", "layer_norm", "gelu", "log", "exp", "cdist", "embedding"},
    promote={"add", "cat"},
)
FLOAT32 = Trial("float32", hmp.Policy("float32"), {}, 2.0, 0.0, 0.91, 0.0, 33.1 * MS, 7 * 2**20, True, ratio=1.0)
BEST = Trial(
    "2 of 4 units", POLICY, {"bf16": ("linear", "matmul")}, 2.002, 0.001, 0.909, 0.0011, 20.5 * MS, 5 * 2**20, True, ratio=0.62
)  # fmt: skip
TRIALS = (
    FLOAT32,
    Trial("habana", hmp.Policy.load("habana"), {}, math.nan, math.nan, None, None, 21 * MS, 5 * 2**20, False,
          "the loss is not finite", taken="habana"),
    Trial("autocast", hmp.Policy.load("torch-cpu"), {}, 2.01, 0.005, 0.908, 0.0022, 22 * MS, 5 * 2**20, True, ratio=0.66,
          taken="autocast"),
    Trial("all units", hmp.Policy("all"), {"bf16": ("linear", "matmul", "gelu", "softmax")}, 2.08, 0.04, 0.88, 0.033, 19 * MS,
          4 * 2**20, False, "loss +4.00%, 1.00% allowed", 0.57),
    Trial("3 of 4 units", hmp.Policy("three"), {"bf16": ("linear", "matmul", "gelu")}, 2.03, 0.015, 0.9, 0.011, 20 * MS, 5 * 2**20,
          False, "loss +1.50%, 1.00% allowed", 0.6),
    BEST,
)  # fmt: skip


def result(**changes: Any) -> TuneResult:
    """A search that was solved, with whatever is to be otherwise."""
    made = TuneResult(
        policy=POLICY, best=BEST, trials=TRIALS, units=UNITS,
        tolerance=Tolerance(loss=0.01), objective="time", stopped="solved",
        start="habana", seed=0, steps=20, device="cpu", torch="2.13.0",
    )  # fmt: skip
    return replace(made, **changes)


def bare() -> TuneResult:
    """As little as a search can find."""
    only = trial("nothing low", ())
    return result(units=(), trials=(FLOAT32, only), best=only, policy=hmp.Policy(), tolerance=Tolerance(), steps=0)


def nasty(text: str) -> TuneResult:
    """A search in which every name that a user or torch may choose is `text`."""
    of = trial(text, (f"linear @ {text}",), ratio=0.5)
    named = trial(text + "2", (), fits=False, why=text, ratio=0.7, taken=text)
    return result(
        units=(unit("linear", text), unit(f"$x$ {text}")), trials=(FLOAT32, of, named), best=of, policy=hmp.Policy(text, bf16={"linear"}),
        device=text, torch=text, start=text, folder=text,
    )  # fmt: skip


def crowded() -> TuneResult:
    """Many trials near each other, several of them named, and long names of units."""
    near = tuple(
        trial(f"policy-of-somebody@{at}", (), taken="x", ratio=0.62 + 0.004 * at, loss_change=0.001 * (at % 3), metric_change=0.0)
        for at in range(4)
    )
    beyond = tuple(
        trial(f"{at} low", ("linear",), ratio=0.6 + at / 100, loss_change=0.02 * at, fits=False, why="far") for at in range(1, 9)
    )
    deep = tuple(unit("scaled_dot_product_attention", f"model.decoder.layers.{at}.self_attention") for at in range(40))
    return result(trials=(*TRIALS, *near, *beyond), units=(*UNITS, *deep))
