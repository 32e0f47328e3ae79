"""P1, one call: whatever op is called, in whatever spelling, with whatever tensors, under whatever list and context, it gives what
explicit casts in plain torch give.

Oracle: `attempt.expect`, the first plan of casts of rules.md that plain torch accepts, run before anything was patched. Compared are the
result (type, dtype, shape, bits, nesting), the identity of what in-place ops and out= return, which inputs were written, which results
share memory with which inputs, and the gradient of each leaf in its dtype. Rules R1 to R9 and R11.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hmp
import sweep_exceptions
from attempt import Attempt, Expectation, accepted, differences, expect, expect_out, lacks_kernel, untouched
from ops import KINDS, Call, Sample, more_calls, odd_calls, op_db, samples, title
from oracle import BF16, CASTABLE, F16, F32, F64, Lists, castable, distinct

RULES = {
    "bf16": ("bf16",),
    "fp32": ("fp32",),
    "promote": ("promote",),
    "bf16 over promote": ("bf16", "promote"),
    "fp32 over promote": ("fp32", "promote"),
    "unlisted": (),
}
OTHER = hmp.Policy("another", bf16={"erfinv"}, fp32={"tanh", "matmul", "add", "softmax"})


class Calling(torch.nn.Module):
    def forward(self, work: Callable[[], None]) -> None:
        work()


@contextlib.contextmanager
def converted_and_back(policy: hmp.Policy) -> Iterator[None]:
    with hmp.convert(policy=OTHER), hmp.disable_casts(), hmp.casts(policy):
        yield


@contextlib.contextmanager
def re_enabled(policy: hmp.Policy) -> Iterator[None]:
    with hmp.convert(policy=policy), hmp.disable_casts(), hmp.enable_casts():
        yield


@contextlib.contextmanager
def inside_autocast(policy: hmp.Policy) -> Iterator[None]:
    with torch.autocast("cpu"), hmp.casts(policy):
        yield


@contextlib.contextmanager
def behind_others(policy: hmp.Policy) -> Iterator[None]:
    with hmp.casts(policy):
        with hmp.casts(OTHER), hmp.disable_casts():
            torch.tanh(torch.ones(1))
        yield


@contextlib.contextmanager
def disabled(policy: hmp.Policy) -> Iterator[None]:
    with hmp.casts(policy), hmp.disable_casts():
        yield


@contextlib.contextmanager
def in_an_island(policy: hmp.Policy) -> Iterator[None]:
    with hmp.convert(policy=policy), torch.autocast("cpu", enabled=False):
        yield


ON: dict[str, Callable[[hmp.Policy], Any]] = {
    "convert": lambda policy: hmp.convert(policy=policy),
    "casts": hmp.casts,
    "casts in disable_casts in another": converted_and_back,
    "enable_casts in disable_casts": re_enabled,
    "casts in autocast": inside_autocast,
    "behind others": behind_others,
}
OFF: dict[str, Callable[[hmp.Policy], Any]] = {"disable_casts": disabled, "autocast switched off": in_an_island}


@dataclass
class Case:
    """A call with one mixture of dtypes and kinds, what the rules allow for it, and hmp's attempt at it."""

    call: Call
    sample: Sample
    dtypes: tuple[torch.dtype, ...]
    kinds: tuple[str, ...]
    out: str
    expected: Expectation
    attempt: Attempt

    def __str__(self) -> str:
        dtypes = " ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{self.call.op} | {self.call.variant} | {dtypes} | {' '.join(self.kinds)} {self.out}"


def listable(name: str | None) -> bool:
    if name is None:
        return False
    try:
        return bool(hmp.Policy("one", bf16={name}).casts_by_op("bf16"))  # an attribute, such as mT, is no function
    except hmp.OpListError:
        return False


def drawn_call(op: str, number: int) -> tuple[Call, Sample, random.Random] | None:
    """One of the calls of an op with one of its samples, chosen by a number, None where plain torch takes none of those tried."""
    chosen = random.Random(f"{op} {number}")
    info = next(each for each in op_db() if title(each) == op)
    calls, given_samples = list(more_calls(info)), samples(info)
    for _ in range(6):
        call, sample = chosen.choice(calls), chosen.choice(given_samples[:8])
        if accepted(call, sample):
            return call, sample, chosen
    return None


def case_of(call: Call, sample: Sample, chosen: random.Random, kind: str | None, low: torch.dtype, off: bool) -> Case | None:
    """The call with dtypes, kinds and an out that the generator chooses, oracle done; None where no rule says what comes of it."""
    count = len(distinct(castable(sample.tree)))
    dtypes = tuple(chosen.choice((F32, F32, BF16, F16)) for _ in range(count))
    if count and chosen.random() < 0.06:
        dtypes = (F64, *dtypes[1:])
    kinds = tuple(chosen.choice(("plain",) * 3 + KINDS) for _ in range(count))
    if call.out:
        if F64 in dtypes:
            return None
        how, dtype = chosen.choice(("full", "empty", "view")), chosen.choice(CASTABLE)
        expected, out = expect_out(call, sample, dtypes, kind, dtype, how=how, low=low) if not off else (Expectation([], False), ())
        attempt = Attempt(call, sample, dtypes, grad=False, out=out)
        return Case(call, sample, dtypes, (), f"into {how} {dtype}", expected, attempt) if expected.allowed else None
    if call.in_place:
        kinds = tuple("plain" if each == "subclass" else each for each in kinds)
    expected = untouched(call, sample, dtypes, kinds) if off else expect(call, sample, dtypes, kind, kinds, low)
    return Case(call, sample, dtypes, kinds, "", expected, Attempt(call, sample, dtypes, grad=expected.grad, kinds=kinds))


def complaints(cases: list[Case], policy: hmp.Policy, context: Callable[[hmp.Policy], Any], off: bool) -> list[str]:
    """How the calls under the policy differ from what the rules allow."""
    with context(policy):
        for case in cases:
            case.attempt.run(hmp.disable_casts)
    hmp.revert()
    return [line for case in cases for line in wrong(case, off)]


def wrong(case: Case, off: bool) -> list[str]:
    got, expected = case.attempt.outcome(), case.expected
    if got.error.partition(":")[0] in expected.errors:
        return []
    if not expected.allowed:
        return [f"{case}: got {got.error or 'no error'}, torch raises {expected.errors}"]
    found = min((differences(case.call, got, want, bool(case.out)) for want in expected.allowed), key=len)
    if found and not off:
        allowed = lacks_kernel(case.call, case.sample, case.dtypes, expected, case.kinds)  # R11's table knows ops, not samples
        found = min((found, *(differences(case.call, got, want, bool(case.out)) for want in allowed)), key=len)
    if any(is_it(case) for is_it in KNOWN):
        return []
    found = [(what, detail) for what, detail in found if (case.call.op, what) not in EXCEPTED]
    if case.call.op in RECURRENT:  # R21: their steps' gradients are summed in float32, with torch's low kernels in the low-precision dtype
        found = [(what, detail) for what, detail in found if what != "gradient"]
    return [f"{case}: {what}: {detail}" for what, detail in found]


def mixed(case: Case) -> bool:
    return len(set(case.dtypes)) > 1


# Defects of hmp that are known: exactly these cases are left out.
KNOWN: tuple[Callable[[Case], bool], ...] = (
    # R7, R9: an input is not found by numpy's name for it
    lambda case: case.call.variant.startswith("numpy's") and (mixed(case) or "norm" in case.call.op),
    # R7: torch takes the mixture, and hmp casts it
    lambda case: case.call.op == "cross_entropy" and case.call.variant == "probabilities" and mixed(case) and "subclass" in case.kinds,
    lambda case: case.call.name == "binary_cross_entropy" and mixed(case),
    # R11: found by failing, with a subclass among the inputs: the float32 run takes what was rounded before
    lambda case: case.call.name == "histogram" and "subclass" in case.kinds,
    # R7: forward takes the mixture, backward does not, and hmp casts nothing
    lambda case: case.call.name == "addr" and mixed(case),
)


RECURRENT = {"rnn_relu", "rnn_tanh", "lstm", "gru"}
EXCEPTED = {(entry.op, what.strip()) for entry in sweep_exceptions.EXCEPTIONS for what in entry.what.split(",")}
# op_db's entries with no rule that says what comes of them, or with values of torch's own making
LEFT_OUT = sweep_exceptions.NOT_ON_CPU | sweep_exceptions.OUT_OF_REACH


@st.composite
def op_names(draw: st.DrawFn) -> str:
    return draw(st.sampled_from([title(info) for info in op_db() if info.name not in LEFT_OUT]))


def policy_of(names: set[str], rule: str, low: torch.dtype) -> tuple[hmp.Policy, Lists]:
    lists = {each: frozenset(names if each in RULES[rule] else ()) for each in ("bf16", "fp32", "promote")}
    return hmp.Policy("drawn", dtype=low, **lists), Lists(**lists)


@settings(max_examples=max(3, settings.default.max_examples // 2))
@given(
    chosen=st.lists(st.tuples(op_names(), st.integers(0, 10**6)), min_size=12, max_size=24),
    rule=st.sampled_from(sorted(RULES)),
    low=st.sampled_from([BF16, BF16, F16]),
    context=st.sampled_from([*ON, *ON, *OFF]),
)
@pytest.mark.filterwarnings("ignore")
def test_p1_any_call_gives_what_its_casts_written_out_give(chosen: Any, rule: str, low: torch.dtype, context: str) -> None:
    off, cases = context in OFF, []
    drawn = [found for found in (drawn_call(*each) for each in chosen) if found is not None]
    names = {call.name for call, _, _ in drawn if listable(call.name)}
    policy, lists = policy_of(names, rule, low)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call, sample, generator in drawn:
            case = case_of(call, sample, generator, lists.of(call.name) if call.name in names else None, low, off)
            cases += [case] if case is not None else []
        lines = complaints(cases, policy, (ON | OFF)[context], off)
        assert not lines, "\n".join(lines)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rule", "low"), [("bf16", F16), *((rule, BF16) for rule in RULES)])
def test_p1_odd_calls_give_what_their_casts_written_out_give(rule: str, low: torch.dtype) -> None:
    """Each odd call in four mixtures of dtypes and kinds."""
    names = set(filter(listable, (call.name.rstrip("_") for call, _ in odd_calls())))
    policy, lists = policy_of(names, rule, low)
    cases = []
    for number in range(4):
        for call, sample in odd_calls():
            case = case_of(call, sample, random.Random(f"{call.op}{call.variant}{number}"), lists.of(call.name), low, False)
            cases += [case] if case is not None else []
    lines = complaints(cases, policy, hmp.casts, False)
    assert not lines, "\n".join(lines)
