"""Calls of op_db under the preset `torch-cpu` and under torch.autocast("cpu"), and where their results differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import hmp
from ops import title
from oracle import BF16, F32, castable
from preset_sweep import MIXTURES, mixed, outcome, same_bits, samples, spellings

# LAPACK's gelsy does not give the same bits twice.
NOT_REPRODUCIBLE = {"linalg.lstsq": 1e-4}
# The results of these hold whatever was in memory.
UNINITIALISED = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())


@dataclass
class Sweep:
    """What a run over op_db counted and found."""

    spellings: int = 0
    cases: int = 0
    refused: int = 0  # autocast raises: what hmp does then is for the rules to say
    empty: int = 0
    differing: dict[str, list[str]] = field(default_factory=dict)
    raising: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """The numbers that the page of differences holds."""
        return {"cases": self.cases, "spellings": self.spellings, "refused": self.refused, "empty": self.empty}

    def run(self, infos: Iterable[Any], *, first: int | None = None) -> Sweep:
        policy = hmp.Policy.load("torch-cpu")
        # while nothing is patched: an op of op_db is found where it stands by comparison
        calls = [(info, list(spellings(info))) for info in infos]
        for info, spelled_calls in calls:
            chosen = samples(info, first=first)
            for spelled, call in spelled_calls:
                self.spellings += 1
                for number, sample in enumerate(chosen):
                    for mixture in MIXTURES:
                        case = f"{title(info)}, {spelled}, sample {number}, {mixture}"
                        given, again = mixed(sample, mixture, BF16), mixed(sample, mixture, BF16)
                        if given is None or again is None:
                            continue
                        want = outcome(call, given, torch.autocast("cpu", dtype=BF16))
                        if isinstance(want, Exception):
                            self.refused += 1
                            continue
                        self.cases += 1
                        got = outcome(call, again, hmp.casts(policy))
                        if isinstance(got, Exception):
                            self.raising.append(f"{case}: {type(got).__name__}: {got}")
                        elif _is_fallback_without_elements(again, got, want):
                            self.empty += 1
                        elif found := _difference(title(info), got, want):
                            self.differing.setdefault(title(info), []).append(f"{case}: {found}")
        return self


def _difference(op: str, got: list[Any], want: list[Any]) -> str:
    tolerance = NOT_REPRODUCIBLE.get(op.partition("/")[0])
    if len(got) != len(want):
        return f"{len(got)} results, autocast gives {len(want)}"
    for one, other in zip(got, want, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
                return f"{one.dtype} {tuple(one.shape)} {one.layout}, autocast gives {other.dtype} {tuple(other.shape)} {other.layout}"
            if op in UNINITIALISED or one.is_nested:
                continue
            if tolerance and torch.allclose(one, other, tolerance, tolerance):
                continue
            if not same_bits(one, other):
                return "other values"
        elif type(one) is not type(other) or one != other:
            return f"{one!r}, autocast gives {other!r}"
    return ""


def _is_fallback_without_elements(arguments: Any, got: list[Any], want: list[Any]) -> bool:
    """Whether R11 gave float32 where there is nothing to compute, for which torch needs no kernel."""
    dtypes = [t.dtype for t in castable(got)]
    empty = any(t.numel() == 0 for t in castable([arguments, got]))
    return empty and dtypes != [t.dtype for t in castable(want)] and set(dtypes) == {F32}
