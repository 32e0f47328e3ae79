"""Every op of torch's op_db, in every form, under three policies and mixtures of dtypes, against explicit casts in plain torch.

P1 (tests/properties) draws such calls by default; every 24th op with one sample is slow, the whole sweep is nightly.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hmp
import sweep_exceptions
from attempt import Case, accepted, attempted, case_of, cases_into, wrong
from ops import calls, list_name, mixtures, op_db, samples, title
from oracle import BF16, F32, Lists

POLICIES = ("habana", "random A", "random B")


# Two names of one function object of torch's: no list can tell them apart.
_ONE_FUNCTION = {"pos": "positive", "dsmm": "mm", "spmm": "mm", "hsmm": "hspmm", "saddmm": "sspaddmm", "log_sigmoid": "logsigmoid"}


def random_policies(seed: int = 3) -> tuple[hmp.Policy, hmp.Policy]:
    """Two policies with every op on the BF16 or the FP32 list: a random half, and its complement."""
    called = {list_name(each) for info in op_db() for each in (info.name, *(alias.name for alias in info.aliases))}
    presets = map(hmp.Policy.load, hmp.policies())
    listed = {name for preset in presets for name in preset.bf16 | preset.fp32 | preset.promote}
    names = []
    for op in sorted((called | listed | {f"{name}_" for name in called}) - {"*"} - sweep_exceptions.OUT_OF_REACH):
        try:
            alone = hmp.Policy(bf16=frozenset({op})).casts_by_op("bf16")
        except hmp.errors.OpListError:
            continue
        if set(alone) == {op}:
            names.append(op)
    # by name and not by place: an op that torch gains moves no other one
    low = frozenset(op for op in names if zlib.crc32(_ONE_FUNCTION.get(op, op).encode(), seed) % 2)
    wide = frozenset(names) - low
    return hmp.Policy("random A", bf16=low, fp32=wide), hmp.Policy("random B", bf16=wide, fp32=low)


@functools.cache
def policies() -> dict[str, tuple[hmp.Policy, Lists]]:
    """The policies of the sweep, each with its lists as the oracle reads them."""
    random = {policy.name: (policy, Lists(policy.bf16, policy.fp32, policy.promote)) for policy in random_policies()}
    return {"habana": (hmp.Policy.load("habana"), Lists.read("habana"))} | random


def cases(info: Any, lists: Lists, count: int) -> Iterator[Case]:
    """The op in every form with up to `count` samples in each mixture of dtypes."""
    found = samples(info)
    for call in calls(info):
        kind = lists.of("" if call.op == "unfold" else call.name)  # R10: the method is a view, which lists do not mean: they name F.unfold
        for number, sample in enumerate(itertools.islice((s for s in found if accepted(call, s)), count)):
            for dtypes in mixtures(sample, float64=number == 0 and not call.out):
                if call.out:
                    outs = [("full", BF16)]
                    if set(dtypes) != {BF16}:
                        outs.append(("empty" if dtypes[:1] == (BF16,) else "full", F32))
                    yield from cases_into(call, sample, dtypes, kind, outs)
                elif (case := case_of(call, sample, dtypes, kind)).expected.allowed:
                    yield case


def complaints(infos: list[Any], name: str, count: int) -> list[str]:
    """What is wrong, as lines; nothing where hmp does what the rules ask."""
    policy, lists = policies()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = [case for info in infos for case in cases(info, lists, count)]
        with hmp.convert(policy=policy):
            attempted(prepared)
        hmp.revert()
        lines = [line for case in prepared for line in wrong(case)]
    called = {case.call.op for case in prepared}
    not_here = sweep_exceptions.NOT_ON_CPU
    lines += [f"{op}: not one call was made" for op in map(title, infos) if op not in called and op not in not_here]
    return lines + [f"{op}: runs here, take it off NOT_ON_CPU" for op in map(title, infos) if op in called and op in not_here]


@pytest.mark.parametrize(
    ("policy", "shard", "shards", "most"),
    [
        *(pytest.param(policy, shard, 24, 1, marks=pytest.mark.slow) for shard, policy in enumerate(("habana", "random A"))),
        *(pytest.param(policy, shard, 8, 6, marks=pytest.mark.nightly) for policy in POLICIES for shard in range(8)),
    ],
)
def test_op_db_follows_the_rules(policy: str, shard: int, shards: int, most: int) -> None:
    """Each op of the shard with at most so many samples: neighbours in op_db are ops of one kind."""
    lines = complaints(list(op_db()[shard::shards]), policy, most)
    assert not lines, "\n  ".join([f"{len(lines)} complaints:", *lines[:60]])


TABLES_TORCH = pytest.mark.skipif(
    not torch.__version__.startswith(sweep_exceptions.TORCH + "."), reason="the table was made with another torch"
)


@pytest.mark.slow  # to import op_db takes seconds
@TABLES_TORCH
def test_the_names_of_the_tables_are_in_op_db() -> None:
    tables = sweep_exceptions
    named = {*(op for op, _ in tables.EXCEPTIONS), *tables.STRUCTURE}
    assert sorted(named - {title(info) for info in op_db()}) == []
    assert sorted((tables.OUT_OF_REACH | tables.UNINITIALISED | tables.ROUGH.keys()) - {info.name for info in op_db()}) == []
