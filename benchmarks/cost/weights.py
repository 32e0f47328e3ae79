"""Inference with weights that `hmp.cast_weights(model)` stored in the dtype of their ops, of a model as people load one: from a file of
safetensors. Its time against torch.autocast's, which casts each weight in each call, and its weights' bytes."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from functools import partial

import torch

import hmp

from ..harness.results import Found, Row, at_most
from ..harness.sides import Side, autocast, policy_of
from ..harness.stats import paired_ratio
from ..harness.timing import one_thread
from ..workloads import models
from ..workloads.small import seconds_of

TIME, BYTES = 0.85, 0.60
WIDTH, BLOCKS = 768, 4
BATCHES = ((1, 16), (1, 64), (4, 64))  # sequences and their tokens: the more of them, the smaller the part of the weights' casts
TARGETS = 2  # of these have one


def _loaded(width: int, blocks: int, count: int) -> list[torch.nn.Module]:
    """Return one encoder as often, each loaded from the same file."""
    torch.manual_seed(0)
    model, _ = models._bert(width, blocks, 1, max(length for _, length in BATCHES))
    with tempfile.TemporaryDirectory(prefix="hmp-bert-") as folder:
        model.bert.save_pretrained(folder)
        return [type(model.bert).from_pretrained(folder, add_pooling_layer=False).eval() for _ in range(count)]


@contextlib.contextmanager
def _applied(model: torch.nn.Module, policy: str) -> Iterator[None]:
    hmp.apply(model, policy)
    try:
        yield
    finally:
        hmp.remove(model)


def run(rounds: int, seconds: float, smallest: bool = False) -> Found:
    """Return the rows about stored weights, of one thread; times are the thread's own processor time."""
    found, policy = Found("weights"), policy_of("cpu")
    if importlib.util.find_spec("transformers") is None:
        found.details = ["not measured: needs transformers"]
        return found
    width, blocks, batches = (32, 1, BATCHES[:1]) if smallest else (WIDTH, BLOCKS, BATCHES)
    theirs, ours, wide = _loaded(width, blocks, 3)
    result = hmp.cast_weights(ours, policy=policy)
    of = {"hmp": ours, "hmp, float32 weights": wide, "autocast": theirs}
    among = {name: Side(name, visit=partial(_applied, of[name], policy)) for name in ("hmp", "hmp, float32 weights")}
    among["autocast"] = autocast("cpu")
    share = result.bytes_after / result.bytes_before
    found.details = [
        f"BERT, {blocks} blocks of width {width}, from a file of safetensors; one thread; time / torch.autocast's",
        f"{'tokens':12} {'cast_weights()':>15} {'float32 weights':>16}",
    ]
    for rows, length in batches:
        ids, tokens = models._tokens(rows, length, 1000), f"{rows} x {length}"

        def step(side: Side, ids: torch.Tensor = ids) -> torch.Tensor:
            with torch.inference_mode():
                return side.run(lambda: of[side.name](ids).last_hidden_state)  # type: ignore[no-any-return]

        outputs = {}
        for name, side in among.items():
            with side.visit():
                outputs[name] = step(side)
        if not torch.equal(outputs["hmp"], outputs["hmp, float32 weights"]):
            found.failures.append(f"weights: {tokens} tokens: the outputs changed with the weights' dtypes")
        with one_thread():
            samples = found.samples[f"{tokens} tokens"] = seconds_of(step, among, rounds, 15 * seconds)  # type: ignore[arg-type]
        ratio = paired_ratio(samples["hmp"], samples["autocast"])
        before = paired_ratio(samples["hmp, float32 weights"], samples["autocast"])
        found.details.append(f"{tokens:12} {ratio.text():>15} {before.text():>16}")
        if (rows, length) not in BATCHES[:TARGETS]:
            continue
        what = f"inference of a BERT from safetensors after cast_weights(), {tokens} tokens, hmp / torch.autocast"
        found.rows.append(at_most(what, TIME, ratio, ratio.text()))
    mib = f"{result.bytes_before / 2**20:.1f} MiB became {result.bytes_after / 2**20:.1f}"
    met = None if smallest else share <= BYTES
    found.rows.append(Row("bytes of its weights, after / before", f"≤ {BYTES:.2f}", f"{share:.3f} ({mib})", met))
    return found
