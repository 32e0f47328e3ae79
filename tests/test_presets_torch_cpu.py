"""`torch-cpu` does over op_db what torch.autocast("cpu") does: the same output dtypes, bitwise the same values. What differs is named."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import hmp
from oracle import BF16, F32, castable, tensors
from preset_sweep import MIXTURES, OPS, Difference, mixed, named, outcome, same_bits, samples, shard, spellings, title

SHARDS = 8

PRODUCTS = "C++ code with products inside: autocast runs those in the low dtype, the rest in float32; hmp decides for the whole op"
PYTHON = "R8: Python code of torch is one op; autocast decides for each op that it calls"
FORMS = "one name; autocast has a rule for some of its forms only"
TWIN = "a name covers its twin in torch.sparse; autocast has no rule for this one"
MASK = "R12: the mask of attention is left alone; autocast rounds it"
MIXTURE = "R7: the first input decides; this release computes the mixture in the matrix's dtype, later ones refuse it"
NUMBERS = "Python code of torch draws the random samples in the input's dtype before autocast casts both; here the input is cast first"


EXCEPTIONS = {
    "cov": Difference(PRODUCTS),
    "corrcoef": Difference(PRODUCTS),
    "einsum": Difference(PRODUCTS),
    "tensordot": Difference(PRODUCTS),
    "nn.functional.bilinear": Difference(PRODUCTS),
    "linalg.matrix_power": Difference(PRODUCTS),
    "linalg.pinv": Difference(PRODUCTS),
    "linalg.pinv/hermitian": Difference(PRODUCTS),
    "svd_lowrank": Difference(PYTHON),
    "pca_lowrank": Difference(PYTHON),
    "nn.functional.linear_cross_entropy": Difference(PYTHON),
    "nn.functional.linear_cross_entropy/chunked": Difference(PYTHON),
    "nn.functional.linear_cross_entropy/chunked_none": Difference(PYTHON),
    "nn.functional.interpolate/area": Difference(PYTHON),
    "masked.prod": Difference(PYTHON),
    "nn.functional.pad/reflect": Difference(FORMS),
    "nn.functional.pad/replicate": Difference(FORMS),
    "nn.functional.pad/replicate_negative": Difference(FORMS),
    "nn.functional.max_pool3d": Difference(FORMS),
    "sparse.mm/reduce": Difference(TWIN),
    "nn.functional.scaled_dot_product_attention": Difference(MASK),
    "inner": Difference(PRODUCTS, "2.7"),
    "addmv": Difference(MIXTURE, "2.7"),
    "nn.functional.fractional_max_pool2d": Difference(NUMBERS, "2.7"),
    "nn.functional.fractional_max_pool3d": Difference(NUMBERS, "2.7"),
    "linalg.polar": Difference(PRODUCTS, "2.15"),
}
NAMED = named(EXCEPTIONS)
# The results of these hold whatever was in memory.
UNINITIALISED = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())
# LAPACK's gelsy does not give the same bits twice.
NOT_REPRODUCIBLE = {"linalg.lstsq": 1e-4}


@dataclass
class Sweep:
    """What a run over op_db counted and found."""

    spellings: int = 0
    cases: int = 0
    refused: int = 0  # autocast raises: what hmp does then is for the rules to say
    empty: int = 0
    differing: dict[str, list[str]] = field(default_factory=dict)
    raising: list[str] = field(default_factory=list)

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


def _check(sweep: Sweep) -> None:
    unnamed = [line for op, lines in sweep.differing.items() if op not in NAMED for line in lines[:3]]
    assert not sweep.raising, "autocast does not raise:\n" + "\n".join(sweep.raising)
    assert not unnamed, "\n".join(unnamed)


def test_the_first_sample_of_the_listed_ops_and_of_every_fourth_other_has_autocasts_dtypes_and_bits() -> None:
    policy = hmp.Policy.load("torch-cpu")
    listed = policy.bf16 | policy.fp32 | policy.promote
    sweep = Sweep().run((info for i, info in enumerate(OPS) if i % 4 == 0 or info.name.removeprefix("nn.functional.") in listed), first=1)
    _check(sweep)
    assert sweep.spellings > 350
    assert sweep.cases > 800


@pytest.mark.slow
@pytest.mark.parametrize("number", range(SHARDS))
def test_op_db_has_autocasts_dtypes_and_bits(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    infos = shard(number, SHARDS)
    sweep = Sweep().run(infos)
    _check(sweep)
    expected = NAMED & set(map(title, infos))
    assert sweep.differing.keys() == expected, "take an op that no longer differs out of the table"
    with capsys.disabled():
        print(
            f"\ntorch-cpu against torch.autocast, shard {number}: {sweep.cases} cases of {sweep.spellings} spellings, {sweep.refused} that"
            f" autocast refuses, {sweep.empty} without elements, {len(expected)} of {len(NAMED)} named exceptions"
        )


@pytest.mark.parametrize("kind", ["LSTM", "RNN", "RNNCell", "GRU", "LSTMCell", "GRUCell"])
def test_recurrent_modules_have_autocasts_dtypes_and_the_listed_ones_its_bits(kind: str) -> None:
    module = getattr(torch.nn, kind)(4, 6)
    for dtype, grad in itertools.product((F32, BF16), (True, False)):
        x = torch.randn((2, 4) if kind.endswith("Cell") else (3, 2, 4)).to(dtype)
        with torch.set_grad_enabled(grad):
            with torch.autocast("cpu", dtype=BF16):
                want = list(tensors(module(x)))
            with hmp.casts("torch-cpu"):
                got = list(tensors(module(x)))
        assert [t.dtype for t in got] == [t.dtype for t in want]
        # autocast runs the products of the other three in bfloat16 and their gates in float32; here each is one op, for its inputs
        if kind in ("LSTM", "RNN", "RNNCell") or dtype is BF16:
            assert all(map(torch.equal, got, want))
        else:
            assert all(torch.allclose(one, other, atol=0.02) for one, other in zip(got, want, strict=True))


def test_chain_matmul_has_autocasts_bits() -> None:
    matrices = [torch.randn(3, 5), torch.randn(5, 2), torch.randn(2, 4)]
    with torch.autocast("cpu", dtype=BF16):
        want = torch.chain_matmul(*matrices)
    with hmp.casts("torch-cpu"):
        got = torch.chain_matmul(*matrices)
    assert got.dtype is want.dtype is BF16
    assert torch.equal(got, want)
