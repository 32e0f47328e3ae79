"""Runs the sweep: the oracle first, on a torch that nothing has patched, then the same calls under a policy; what differs is a finding."""

from __future__ import annotations

import functools
import itertools
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import hmp
from attempt import Attempt, Expectation, accepted, also_without_kernel, differences, expect, expect_out
from ops import Call, Sample, calls, list_name, mixtures, op_db, samples
from oracle import BF16, F32, LISTS, Lists


@dataclass(frozen=True)
class Finding:
    """One difference between what hmp did and what the rules allow."""

    op: str
    variant: str
    policy: str
    mixture: str
    what: str  # raises, nesting, dtype, values, gradient, input, write, alias
    detail: str
    no_kernel: bool = False

    @property
    def key(self) -> str:
        return f"{self.op} | {self.variant} | {self.policy} | {self.mixture} | {self.what}"

    def __str__(self) -> str:
        return f"{self.key}: {self.detail}"


@dataclass
class Case:
    """A call with one mixture of dtypes, what the rules allow for it, and hmp's attempt at it."""

    call: Call
    sample: Sample
    number: int
    mixture: str
    dtypes: tuple[torch.dtype, ...]
    expected: Expectation
    attempt: Attempt

    def findings(self, policy: str) -> list[Finding]:
        got = self.attempt.outcome()
        compared = [differences(self.call, got, want, self.attempt.out is not None) for want in self.expected.allowed]
        best = min(compared, key=len)
        mixture = self.mixture
        return [
            Finding(self.call.op, self.call.variant, policy, mixture, what, f"{detail} (sample {self.number})", self.expected.no_kernel)
            for what, detail in best
        ]


# Two names of one function object of torch's: no list can tell them apart.
_ONE_FUNCTION = {"pos": "positive", "dsmm": "mm", "spmm": "mm", "hsmm": "hspmm", "saddmm": "sspaddmm", "log_sigmoid": "logsigmoid"}


def random_policies(seed: int = 3) -> tuple[hmp.Policy, hmp.Policy]:
    """Two policies with every op on the BF16 or the FP32 list: a random half, and its complement."""
    called = {list_name(each) for info in op_db() for each in (info.name, *(alias.name for alias in info.aliases))}
    presets = map(hmp.Policy.load, hmp.policies())
    listed = {name for preset in presets for name in preset.bf16 | preset.fp32 | preset.promote}
    names = []
    for op in sorted(called | listed | {f"{name}_" for name in called}):
        try:
            alone = hmp.Policy(bf16=frozenset({op})).casts_by_op("bf16")
        except hmp.OpListError:
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
    release = ".".join(torch.__version__.split(".")[:2])
    found = {}
    for name, folder in (("habana", "habana"), ("torch-cpu", f"torch-cpu@{release}")):
        policy = hmp.Policy.load(name)
        # lists of every release are not kept: then the preset is the nearest one's, and says itself what it holds
        kept = (LISTS / folder).is_dir()
        found[name] = (policy, Lists.read(folder) if kept else Lists(policy.bf16, policy.fp32, policy.promote))
    for policy in random_policies():
        found[policy.name] = (policy, Lists(policy.bf16, policy.fp32, policy.promote))
    return found


# For each mixture the `out` tensors that are tried: (dtype, whether empty).
_OUTS = {
    "fp32": ((F32, False), (BF16, False)),
    "bf16": ((BF16, False),),
    "first fp32": ((F32, False),),
    "first bf16": ((F32, True), (BF16, False)),
}


def prepared(infos: Iterable[Any], lists: Lists, count: int) -> Iterator[Case]:
    """The cases of these OpInfos with up to `count` samples a call, oracle done. To be called while nothing of torch is patched."""
    for info in infos:
        cases = list(_cases(info, lists, count))
        if any(case.expected.no_kernel for case in cases):
            # R11's table knows ops, not samples: an empty matrix needs no kernel, and may go the way of the others
            for case in cases:
                case.expected.allowed += also_without_kernel(case.call, case.sample, case.dtypes, case.expected)
        yield from cases


def _cases(info: Any, lists: Lists, count: int) -> Iterator[Case]:
    found = samples(info)
    for call in calls(info):
        kind = lists.of(call.name)
        for number, sample in enumerate(itertools.islice((s for s in found if accepted(call, s)), count)):
            for mixture, dtypes in mixtures(sample, float64=number == 0 and not call.out):
                if call.out:
                    for dtype, empty in _OUTS[mixture]:
                        expected, out = expect_out(call, sample, dtypes, kind, dtype, how="empty" if empty else "full")
                        if expected.allowed:
                            into = f"{mixture} into {'bf16' if dtype is BF16 else 'fp32'}"
                            attempt = Attempt(call, sample, dtypes, grad=False, out=out)
                            yield Case(call, sample, number, into, dtypes, expected, attempt)
                    continue
                expected = expect(call, sample, dtypes, kind)
                if expected.allowed:
                    yield Case(call, sample, number, mixture, dtypes, expected, Attempt(call, sample, dtypes, grad=expected.grad))


@dataclass
class Sweep:
    """What a sweep did: the calls made under the policy, by op, and the findings."""

    calls: Counter[str]
    findings: list[Finding]


def sweep(infos: Iterable[Any], name: str, policy: hmp.Policy, lists: Lists, count: int) -> Sweep:
    """Calls every form of these ops under the policy, with up to `count` samples each, and compares with the oracle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = list(prepared(infos, lists, count))
        with hmp.convert(policy=policy):
            for case in cases:
                case.attempt.run(hmp.disable_casts)
        hmp.revert()
        findings = [finding for case in cases for finding in case.findings(name)]
    return Sweep(Counter(case.call.op for case in cases), findings)
