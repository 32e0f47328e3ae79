"""The size of hmp's caches, in entries and bytes, through many training steps with evaluations between them."""

from __future__ import annotations

from typing import Any

import hmp

from ..harness.results import Found, Row
from ..harness.sides import policy_of, under_hmp
from ..workloads import models
from .interleaved import stepper

EVALUATE_EVERY = 10


def run(steps: int, device: str) -> Found:
    """Return the row about the memory of caches, over `steps` training steps."""
    found = Found("caches")
    what = f"memory held by caches, {steps:,} training steps with an evaluation every {EVALUATE_EVERY}"
    info = getattr(hmp, "cache_info", None)
    if info is None:
        found.details = ["this hmp has no cache: there is no hmp.cache_info()"]
        found.rows = [Row(what, "flat, within its limit", "this hmp has no cache", None)]
        return found
    case = models.build("mlp", "tiny", device)
    side = under_hmp(policy_of(device))
    seen: list[dict[str, Any]] = []
    with side.visit():
        train = stepper(case, "training", side)
        evaluate = stepper(case, "no_grad", side)
        for number in range(1, steps + 1):
            case.model.train()
            train()
            if number % EVALUATE_EVERY == 0:
                case.model.eval()
                evaluate()
                seen.append({"step": number, **{key: getattr(info(), key) for key in ("entries", "bytes", "limit", "hits", "misses")}})
        hmp.clear_cache()
        cleared = info().bytes
        evaluate()
    reverted = info().bytes
    weights = sum(p.numel() * p.element_size() for p in case.model.parameters())
    found.samples = {"seen": seen, "after clear_cache()": cleared, "after revert()": reverted, "bytes of weights": weights}
    half = len(seen) // 2
    early, late = (max((entry["bytes"] for entry in part), default=0) for part in (seen[:half], seen[half:]))
    last = seen[-1]
    found.details = [
        f"weights {weights:,} bytes; limit {last['limit']} bytes; {last['hits']} hits, {last['misses']} misses",
        f"at most {early:,} bytes in the first half, {late:,} in the second; {cleared} after clear_cache(), {reverted} after revert()",
    ]
    within = last["limit"] is None or late <= last["limit"]
    met = late <= early and within and not cleared and not reverted
    result = f"{early:,} then {late:,} bytes in {last['entries']} entries, {cleared} after clear_cache(), {reverted} after revert()"
    found.rows = [Row(what, "flat, within its limit, freed", result, met)]
    return found
