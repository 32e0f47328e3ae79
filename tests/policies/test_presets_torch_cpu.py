"""`torch-cpu` does what torch.autocast("cpu") does: the same output dtypes, bitwise the same values. What differs is named.

Over op_db; and over public functions of torch.nn.functional, torch.nn.attention and torch.nested that op_db lacks, watched by a recording
or not.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
import public_calls
from ops import op_db, title
from oracle import BF16, F32, castable, unlike
from preset_sweep import RELEASE, cases, mixed, outcome, shard, spellings

pytestmark = [pytest.mark.native_kernels, pytest.mark.filterwarnings("ignore")]
SHARDS = 8

PAGE = (Path(__file__).resolve().parents[2] / "docs/dev/differences-from-autocast.md").read_text(encoding="utf-8")
# Its first table: ops of op_db that give another dtype or other bits, and on which releases of torch. One that no longer differs fails.
EXCEPTIONS = dict(re.findall(r"^\| `([\w.]+)` \| ([\d. ]+|all) \| ", PAGE, re.MULTILINE))
NAMED = {op for op, releases in EXCEPTIONS.items() if releases == "all" or RELEASE in releases.split()}
# LAPACK's gelsy does not give the same bits twice.
NOT_REPRODUCIBLE = {"linalg.lstsq": 1e-4}
# The results of these hold whatever was in memory.
UNINITIALISED = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16)


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
        policy, infos = hmp.Policy.load("torch-cpu"), list(infos)
        self.spellings = sum(len(list(spellings(info))) for info in infos)
        for op, case, call, sample, mixture in cases(infos, first=first):
            given, again = mixed(sample, mixture, BF16), mixed(sample, mixture, BF16)
            if given is None or again is None:
                continue
            want = outcome(call, given, autocast())
            if isinstance(want, Exception):
                self.refused += 1
                continue
            self.cases += 1
            got = outcome(call, again, hmp.casts(policy))
            if isinstance(got, Exception):
                self.raising.append(f"{case}: {type(got).__name__}: {got}")
            elif _is_fallback_without_elements(again, got, want):
                self.empty += 1
            elif found := difference(op, got, want):
                self.differing.setdefault(op, []).append(f"{case}: {found}")
        return self

    def check(self) -> None:
        unnamed = [line for op, lines in self.differing.items() if op not in NAMED for line in lines[:3]]
        assert not self.raising, "autocast does not raise:\n" + "\n".join(self.raising)
        assert not unnamed, "\n".join(unnamed)


def difference(op: str, got: list[Any] | Exception, want: list[Any] | Exception) -> str:
    """What differs between two outcomes, "" for nothing."""
    if isinstance(got, Exception) or isinstance(want, Exception):
        return "" if type(got) is type(want) else f"{got!r:.200}, not {want!r:.200}"
    tolerance = NOT_REPRODUCIBLE.get(op.partition("/")[0])
    if len(got) != len(want):
        return f"{len(got)} results, not {len(want)}"
    for one, other in zip(got, want, strict=True):
        either_way = isinstance(one, torch.Tensor) and (op in UNINITIALISED or one.is_nested)
        found = unlike(one, other, float("inf") if either_way else 0.0)
        if found and not (tolerance and one.dtype is other.dtype and torch.allclose(one, other, tolerance, tolerance)):
            return str(found)
    return ""


def _is_fallback_without_elements(arguments: Any, got: list[Any], want: list[Any]) -> bool:
    """Whether R11 gave float32 where there is nothing to compute, for which torch needs no kernel."""
    dtypes = [t.dtype for t in castable(got)]
    empty = any(t.numel() == 0 for t in castable([arguments, got]))
    return empty and dtypes != [t.dtype for t in castable(want)] and set(dtypes) == {F32}


def _listed(*kinds: str) -> set[str]:
    policy = hmp.Policy.load("torch-cpu")
    names = {name.removesuffix(".autocast") for kind in kinds for name in getattr(policy, kind)}
    return names | {f"nn.functional.{name}" for name in names}


def test_the_first_sample_of_the_listed_ops_and_of_every_eighth_other_has_autocasts_dtypes_and_bits() -> None:
    listed = _listed("bf16", "fp32", "promote")
    sweep = Sweep().run((info for i, info in enumerate(shard(0, 1)) if i % 8 == 0 or info.name in listed), first=1)
    sweep.check()
    assert sweep.spellings > 200
    assert sweep.cases > 500


@pytest.mark.parametrize(
    "number", [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(at, marks=pytest.mark.nightly) for at in range(1, SHARDS))]
)
def test_op_db_has_autocasts_dtypes_and_bits(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    infos = shard(number, SHARDS)
    sweep = Sweep().run(infos)
    sweep.check()
    expected = NAMED & set(map(title, infos))
    assert sweep.differing.keys() == expected, "take an op that no longer differs out of the table"
    with capsys.disabled():
        print(
            f"\ntorch-cpu against torch.autocast, shard {number}: {sweep.cases} cases of {sweep.spellings} spellings, {sweep.refused} that"
            f" autocast refuses, {sweep.empty} without elements, {len(expected)} of {len(NAMED)} named exceptions"
        )


@pytest.mark.nightly
@pytest.mark.skipif(f"torch {RELEASE}:" not in PAGE, reason="the page has the numbers of another torch")
def test_the_numbers_of_the_page_of_differences_are_those_of_the_sweep() -> None:
    sweep = Sweep().run(shard(0, 1))
    assert f"With torch {RELEASE}: {sweep.cases} calls by {sweep.spellings} names, and {sweep.refused} more" in PAGE
    assert f"{len(sweep.differing)} ops differ, besides {sweep.empty} calls without elements" in PAGE


BINDINGS = {"_linalg": "linalg", "_special": "special", "_fft": "fft", "_sparse": "sparse"}


@pytest.mark.parametrize("binding", BINDINGS)
def test_what_torch_binds_under_two_names_is_one_op(binding: str) -> None:
    """torch.linalg.multi_dot is torch._C._linalg.linalg_multi_dot, which torch's own code and others call."""
    name = BINDINGS[binding]
    public, private = getattr(torch, name), getattr(torch._C, binding)
    twins = {}
    for attribute in dir(private):
        function = getattr(public, attribute.removeprefix("_").removeprefix(name + "_"), None)
        if function is not None and function is getattr(private, attribute):
            twins[attribute] = attribute.removeprefix("_").removeprefix(name + "_")
    assert len(twins) >= (1 if name == "sparse" else 15)
    # every op on a list: each must be met under both names
    with hmp.casts(hmp.Policy("all", fp32={"*"})):
        apart = [a for a, b in twins.items() if getattr(private, a) is not getattr(public, b)]
    assert apart == []


# --- what op_db lacks, and what a recording changes

# Named with its reason on the page of differences.
DIFFERS = {"nn.functional.affine_grid"}
COMPILING = {name for name in public_calls.CALLS if "flex" in name}


@contextlib.contextmanager
def watched(policy: hmp.Policy) -> Iterator[None]:
    with hmp.casts(policy), hmp.record():
        yield


def run(call: Callable[[public_calls.Given], Any], mixture: str, context: contextlib.AbstractContextManager[Any]) -> Any:
    """What is compared: of a jagged tensor its values."""
    found = outcome(lambda: call(public_calls.Given(mixture)), ((), {}), context)
    if isinstance(found, Exception):
        return found
    return [each.values() if isinstance(each, torch.Tensor) and each.layout is torch.jagged else each for each in found]


def check(name: str) -> None:
    policy = hmp.Policy.load("torch-cpu")
    for (number, call), mixture in itertools.product(enumerate(public_calls.CALLS[name]), public_calls.MIXTURES):
        want = run(call, mixture, autocast())
        got, seen = (run(call, mixture, context) for context in (hmp.casts(policy), watched(policy)))
        case = f"call {number}, {mixture}"
        assert difference(name, seen, got) == "", f"{case}: a recording changes the result"
        if not isinstance(want, Exception) and name not in DIFFERS:  # what torch.autocast refuses is for the rules to say
            assert difference(name, got, want) == "", case


@pytest.mark.parametrize("name", sorted(public_calls.CALLS.keys() - COMPILING))
def test_a_public_function_has_autocasts_dtypes_and_bits_watched_or_not(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", sorted(COMPILING))
def test_a_public_function_that_compiles_has_autocasts_dtypes_and_bits_watched_or_not(name: str) -> None:
    check(name)


@pytest.mark.parametrize("at", [pytest.param(at, marks=pytest.mark.nightly if at else pytest.mark.slow) for at in range(8)])
def test_a_recording_changes_no_result_of_any_op(at: int) -> None:
    changed = []
    for policy in map(hmp.Policy.load, ("torch-cpu", "habana")):
        for op, case, call, sample, mixture in cases(op_db()[at::8], first=2):
            given, again = mixed(sample, mixture, BF16), mixed(sample, mixture, BF16)
            if given is not None and again is not None:
                found = difference(op.partition("/")[0], outcome(call, again, watched(policy)), outcome(call, given, hmp.casts(policy)))
                changed += [f"{policy.name}, {case}: {found}"] if found else []
    assert not changed, "\n".join(changed)
