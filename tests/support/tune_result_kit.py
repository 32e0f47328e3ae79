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
        "calls": 24, "error": 1.2e-3, "sensitivity": 1e-4, "seconds_float32": 9 * MS, "seconds_low": 5 * MS, "cast_seconds": 0.9 * MS,
        "saved_bytes": 2**20,
    }  # fmt: skip
    return Unit(op, module, **(values | measured))


def trial(name: str, low: tuple[str, ...] | None, **measured: Any) -> Trial:
    """A trial within the tolerance, but for what is given."""
    values = {
        "loss": 2.0, "loss_change": 0.0, "metric": None, "metric_change": None, "gradient_cosine": 1.0, "seconds": 25 * MS,
        "saved_bytes": 5 * 2**20, "fits": True,
    }  # fmt: skip
    return Trial(name, hmp.Policy(name), low, **(values | measured))


UNITS = (
    unit("linear"),
    unit("matmul", calls=1, seconds_float32=2 * MS, seconds_low=1 * MS, cast_seconds=0.0, sensitivity=1e-6),
    unit("softmax", sensitivity=0.032, seconds_float32=1 * MS, seconds_low=0.5 * MS, cast_seconds=0.0, calls=2),
    unit("layer_norm", seconds_float32=1 * MS, seconds_low=1 * MS, cast_seconds=0.2 * MS, saved_bytes=-8),
    unit("gelu", seconds_float32=1 * MS, seconds_low=0.7 * MS, cast_seconds=0.0),
    unit("log", seconds_float32=0.1 * MS, seconds_low=0.05 * MS, cast_seconds=0.0),
    unit("exp", error=math.inf, sensitivity=math.inf, seconds_low=1 * MS),
    unit("cdist", error=math.inf, sensitivity=math.inf, seconds_low=math.inf),
    unit("add", seconds_float32=0.1 * MS, seconds_low=0.09 * MS, cast_seconds=0.0),
)  # fmt: skip
POLICY = hmp.Policy(
    "tuned",
    bf16={"linear", "matmul", "mm", "conv2d"},
    fp32={"softmax", "layer_norm", "gelu", "log", "exp", "cdist", "embedding"},
    promote={"add", "cat"},
)
FLOAT32 = Trial("float32", hmp.Policy("float32"), (), 2.0, 0.0, 0.91, 0.0, 1.0, 33.1 * MS, 7 * 2**20, True, ratio=1.0)
BEST = Trial(
    "2 of 4 units", POLICY, ("linear", "matmul"), 2.002, 0.001, 0.909, 0.0011, 0.9991, 20.5 * MS, 5 * 2**20, True, ratio=0.62
)  # fmt: skip
TRIALS = (
    FLOAT32,
    Trial("habana", hmp.Policy.load("habana"), None, math.nan, math.nan, None, None, math.nan, 21 * MS, 5 * 2**20, False,
          "the loss is not finite"),
    Trial("autocast", hmp.Policy.load("torch-cpu"), None, 2.01, 0.005, 0.908, 0.0022, 0.998, 22 * MS, 5 * 2**20, True, ratio=0.66),
    Trial("all units", hmp.Policy("all"), ("linear", "matmul", "gelu", "softmax"), 2.08, 0.04, 0.88, 0.033, 0.97, 19 * MS, 4 * 2**20,
          False, "loss +4.00%, 1.00% allowed", 0.57),
    Trial("3 of 4 units", hmp.Policy("three"), ("linear", "matmul", "gelu"), 2.03, 0.015, 0.9, 0.011, 0.99, 20 * MS, 5 * 2**20, False,
          "loss +1.50%, 1.00% allowed", 0.6),
    BEST,
)  # fmt: skip


def result(**changes: Any) -> TuneResult:
    """A search that was solved, with whatever is to be otherwise."""
    made = TuneResult(
        policy=POLICY, best=BEST, trials=TRIALS, units=UNITS,
        tolerance=Tolerance(loss=0.01), objective="time", stopped="solved",
        start="habana", seed=0, steps=20, device="cpu", torch="2.13.0", notes=("One note.",),
    )  # fmt: skip
    return replace(made, **changes)


def bare() -> TuneResult:
    """As little as a search can find."""
    only = trial("nothing low", ())
    return result(units=(), trials=(FLOAT32, only), best=only, policy=hmp.Policy(), tolerance=Tolerance(), notes=(), steps=0)


def nasty(text: str) -> TuneResult:
    """A search in which every name that a user or torch may choose is `text`."""
    of = trial(text, (f"linear @ {text}",), ratio=0.5)
    named = trial(text + "2", None, fits=False, why=text, ratio=0.7)
    return result(
        units=(unit("linear", text), unit(f"$x$ {text}")), trials=(FLOAT32, of, named), best=of, policy=hmp.Policy(text, bf16={"linear"}),
        notes=(text,), device=text, torch=text, start=text, folder=text,
    )  # fmt: skip


def crowded() -> TuneResult:
    """Many trials near each other, several of them named, and long names of units."""
    near = tuple(
        trial(f"policy-of-somebody@{at}", None, ratio=0.62 + 0.004 * at, loss_change=0.001 * (at % 3), metric_change=0.0) for at in range(4)
    )
    beyond = tuple(
        trial(f"{at} low", ("linear",), ratio=0.6 + at / 100, loss_change=0.02 * at, fits=False, why="far") for at in range(1, 9)
    )
    deep = tuple(unit("scaled_dot_product_attention", f"model.decoder.layers.{at}.self_attention") for at in range(40))
    return result(trials=(*TRIALS, *near, *beyond), units=(*UNITS, *deep))
