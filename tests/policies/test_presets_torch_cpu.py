"""`torch-cpu` does over op_db what torch.autocast("cpu") does: the same output dtypes, bitwise the same values. What differs is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hmp
from autocast_sweep import Sweep
from ops import title
from preset_sweep import RELEASE, shard

SHARDS = 8

PAGE = (Path(__file__).resolve().parents[2] / "docs/dev/differences-from-autocast.md").read_text(encoding="utf-8")
# Its first table: ops of op_db that give another dtype or other bits, and on which releases of torch. One that no longer differs fails.
EXCEPTIONS = dict(re.findall(r"^\| `([\w.]+)` \| ([\d. ]+|all) \| ", PAGE, re.MULTILINE))
NAMED = {op for op, releases in EXCEPTIONS.items() if releases == "all" or RELEASE in releases.split()}


def _check(sweep: Sweep) -> None:
    unnamed = [line for op, lines in sweep.differing.items() if op not in NAMED for line in lines[:3]]
    assert not sweep.raising, "autocast does not raise:\n" + "\n".join(sweep.raising)
    assert not unnamed, "\n".join(unnamed)


def _listed(*kinds: str) -> set[str]:
    policy = hmp.Policy.load("torch-cpu")
    names = {name.removesuffix(".autocast") for kind in kinds for name in getattr(policy, kind)}
    return names | {f"nn.functional.{name}" for name in names}


@pytest.mark.native_kernels
def test_the_first_sample_of_the_listed_ops_and_of_every_eighth_other_has_autocasts_dtypes_and_bits() -> None:
    listed = _listed("bf16", "fp32", "promote")
    sweep = Sweep().run((info for i, info in enumerate(shard(0, 1)) if i % 8 == 0 or info.name in listed), first=1)
    _check(sweep)
    assert sweep.spellings > 200
    assert sweep.cases > 500


@pytest.mark.native_kernels
@pytest.mark.parametrize(
    "number", [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(at, marks=pytest.mark.nightly) for at in range(1, SHARDS))]
)
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


@pytest.mark.native_kernels
@pytest.mark.nightly
@pytest.mark.skipif(f"torch {RELEASE}:" not in PAGE, reason="the page has the numbers of another torch")
def test_the_numbers_of_the_page_of_differences_are_those_of_the_sweep() -> None:
    sweep = Sweep().run(shard(0, 1))
    counts = sweep.counts()
    assert f"With torch {RELEASE}: {counts['cases']} calls by {counts['spellings']} names, and {counts['refused']} more" in PAGE
    assert f"{len(sweep.differing)} ops differ, besides {counts['empty']} calls without elements" in PAGE


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
