"""One call of an op, as hmp makes it and as the rules have it: what P1 draws, and what the sweep goes through one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

import hmp
from attempt import Attempt, Expectation, differences, expect, expect_out, lacks_kernel, untouched
from ops import Call, Sample
from oracle import BF16
from sweep_exceptions import EXCEPTIONS

RECURRENT = {"rnn_relu", "rnn_tanh", "lstm", "gru"}


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


def case_of(
    call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], kind: str | None, kinds: tuple[str, ...] = (), low: torch.dtype = BF16
) -> Case:
    """The call on the list `kind`, oracle done. To be called while nothing of torch is patched."""
    expected = expect(call, sample, dtypes, kind, kinds, low)
    return Case(call, sample, dtypes, kinds, "", expected, Attempt(call, sample, dtypes, grad=expected.grad, kinds=kinds))


def case_off(call: Call, sample: Sample, dtypes: tuple[torch.dtype, ...], kinds: tuple[str, ...]) -> Case:
    """The same where casts are off."""
    expected = untouched(call, sample, dtypes, kinds)
    return Case(call, sample, dtypes, kinds, "", expected, Attempt(call, sample, dtypes, grad=expected.grad, kinds=kinds))


def cases_into(
    call: Call,
    sample: Sample,
    dtypes: tuple[torch.dtype, ...],
    kind: str | None,
    outs: Iterable[tuple[str, torch.dtype]],
    low: torch.dtype = BF16,
) -> Iterator[Case]:
    """The same into each of these outs, given by (how, dtype), of which torch takes such a one at all (R6)."""
    for how, dtype in outs:
        expected, out = expect_out(call, sample, dtypes, kind, dtype, how=how, low=low)
        if expected.allowed:
            attempt = Attempt(call, sample, dtypes, grad=False, out=out)
            yield Case(call, sample, dtypes, (), f"into {how} {dtype}", expected, attempt)


def attempted(cases: Iterable[Case]) -> None:
    """Makes the calls, in the context that the caller is in."""
    for case in cases:
        case.attempt.run(hmp.disable_casts)


def wrong(case: Case, off: bool = False) -> list[str]:
    """How the attempt differs from what the rules allow, a line each."""
    got, expected = case.attempt.outcome(), case.expected
    if got.error.partition(":")[0] in expected.errors:
        return []
    if not expected.allowed:
        return [f"{case}: got {got.error or 'no error'}, torch raises {expected.errors}"]
    found = min((differences(case.call, got, want, bool(case.out)) for want in expected.allowed), key=len)
    if found and not off:
        allowed = lacks_kernel(case.call, case.sample, case.dtypes, expected, case.kinds)  # R11's table knows ops, not samples
        found = min((found, *(differences(case.call, got, want, bool(case.out)) for want in allowed)), key=len)
    if len(set(case.dtypes)) > 1 or not case.call.reachable:
        found = [(what, detail) for what, detail in found if (case.call.op, what) not in EXCEPTIONS]
    if case.call.op in RECURRENT:  # R21: their steps' gradients are summed in float32, with torch's low kernels in the low dtype
        found = [(what, detail) for what, detail in found if what != "gradient"]
    return [f"{case}: {what}: {detail}" for what, detail in found]
