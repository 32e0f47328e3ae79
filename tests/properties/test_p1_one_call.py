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
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hmp
import sweep_exceptions
from attempt import Case, accepted, attempted, case_of, case_off, cases_into, wrong
from low_kernels_kit import processor
from ops import KINDS, Call, Sample, more_calls, odd_calls, op_db, samples, title
from oracle import BF16, CASTABLE, F16, F32, F64, Lists, castable, distinct
from trap_kit import listable

RULES = {
    "bf16": ("bf16",),
    "fp32": ("fp32",),
    "promote": ("promote",),
    "bf16 over promote": ("bf16", "promote"),
    "fp32 over promote": ("fp32", "promote"),
    "unlisted": (),
}
OTHER = hmp.Policy("another", bf16={"erfinv"}, fp32={"tanh", "matmul", "add", "softmax"})


@contextlib.contextmanager
def behind_others(policy: hmp.Policy) -> Iterator[None]:
    with hmp.casts(policy):
        with hmp.casts(OTHER), hmp.disable_casts():
            torch.tanh(torch.ones(1))
        yield


def converted(policy: hmp.Policy) -> Any:
    return hmp.convert(policy=policy)


# what is entered one in the other, each given the policy
ON: dict[str, tuple[Callable[[hmp.Policy], Any], ...]] = {
    "convert": (converted,),
    "casts": (hmp.casts,),
    "casts in disable_casts in another": (lambda policy: converted(OTHER), lambda policy: hmp.disable_casts(), hmp.casts),
    "enable_casts in disable_casts": (converted, lambda policy: hmp.disable_casts(), lambda policy: hmp.enable_casts()),
    "casts in autocast": (lambda policy: torch.autocast("cpu"), hmp.casts),
    "behind others": (behind_others,),
}
OFF: dict[str, tuple[Callable[[hmp.Policy], Any], ...]] = {
    "disable_casts": (hmp.casts, lambda policy: hmp.disable_casts()),
    "autocast switched off": (converted, lambda policy: torch.autocast("cpu", enabled=False)),
}


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


def drawn_case(call: Call, sample: Sample, chosen: random.Random, kind: str | None, low: torch.dtype, off: bool) -> list[Case]:
    """The call with dtypes, kinds and an out that the generator chooses, oracle done; none where no rule says what comes of it."""
    count = len(distinct(castable(sample.tree)))
    dtypes = tuple(chosen.choice((F32, F32, BF16, F16)) for _ in range(count))
    if count and chosen.random() < 0.06:
        dtypes = (F64, *dtypes[1:])
    kinds = tuple(chosen.choice(("plain",) * 3 + KINDS) for _ in range(count))
    if call.out:
        outs = [(chosen.choice(("full", "empty", "view")), chosen.choice(CASTABLE))]
        return [] if off or F64 in dtypes else list(cases_into(call, sample, dtypes, kind, outs, low))
    if call.in_place:
        kinds = tuple("plain" if each == "subclass" else each for each in kinds)
    return [case_off(call, sample, dtypes, kinds) if off else case_of(call, sample, dtypes, kind, kinds, low)]


def complaints(cases: list[Case], policy: hmp.Policy, contexts: tuple[Callable[[hmp.Policy], Any], ...], off: bool) -> list[str]:
    """How the calls under the policy differ from what the rules allow."""
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each(policy))
        attempted(cases)
    hmp.revert()
    return [line for case in cases if not any(is_it(case) for is_it in KNOWN) for line in wrong(case, off)]


def mixed(case: Case) -> bool:
    return len(set(case.dtypes)) > 1


# Defects of hmp that are known: exactly these cases are left out.
KNOWN: tuple[Callable[[Case], bool], ...] = (
    # R7, R9: an input is not found by numpy's name for it
    lambda case: case.call.variant.startswith("numpy's") and (mixed(case) or "norm" in case.call.op),
    # R7: torch takes the mixture, and hmp casts it
    lambda case: case.call.name == "binary_cross_entropy" and mixed(case),
    # R11: found by failing, with a subclass among the inputs: the float32 run takes what was rounded before
    lambda case: case.call.name == "histogram" and "subclass" in case.kinds,
    # R9: torch takes some mixtures of statistics, which hmp casts to float32 and writes back
    lambda case: case.call.op == "nn.functional.instance_norm" and mixed(case),
    # R9: a bias alone stays float32, beside a weight of ones, where torch has no kernel for it
    lambda case: case.call.op == "native_layer_norm" and len(case.dtypes) == 2,
    # torch takes no strided input: the oracle's copy in float32 is contiguous
    lambda case: case.call.op in ("native_group_norm", "as_strided_scatter") and "strided" in case.kinds,
    # R6: torch computes the mixture in float32 and rounds into the `out` once, the oracle twice
    lambda case: case.call.op == "inner" and case.call.out and mixed(case),
    # R11: on no list they are left to torch, whose kernel is slow where the processor has no instructions; the oracle computes in float32
    lambda case: case.call.name in ("cov", "corrcoef") and not mixed(case) and case.dtypes[0] in (BF16, F16),
    # R11: a private name on no list is left to torch, which has no kernel
    lambda case: case.call.variant in ("at _C._nn.multi_margin_loss", "at _C._nn.multilabel_margin_loss"),
    # R10: the method is a view, which lists do not mean: they name F.unfold
    lambda case: case.call.op == "unfold",
    # R8: its Python code asks the __torch_function__ of the input alone, so with a subclass as window it pads before it is cast
    lambda case: case.call.name == "stft" and "subclass" in case.kinds,
)


# op_db's entries with no rule that says what comes of them, or with values of torch's own making
LEFT_OUT = sweep_exceptions.NOT_ON_CPU | sweep_exceptions.OUT_OF_REACH


@pytest.fixture(scope="module", autouse=True)
def table_of_ops() -> None:
    op_db()  # torch's takes seconds to import, which is no test's time


@st.composite
def op_names(draw: st.DrawFn) -> str:
    return draw(st.sampled_from([title(info) for info in op_db() if info.name not in LEFT_OUT]))


def policy_of(names: set[str], rule: str, low: torch.dtype) -> tuple[hmp.Policy, Lists]:
    lists = {each: frozenset(names if each in RULES[rule] else ()) for each in ("bf16", "fp32", "promote")}
    return hmp.Policy("drawn", dtype=low, **lists), Lists(**lists)


@settings(max_examples=max(3, settings.default.max_examples // 2))
@given(
    chosen=st.lists(st.tuples(op_names(), st.integers(0, 10**6)), min_size=6, max_size=14),
    rule=st.sampled_from(sorted(RULES)),
    low=st.sampled_from([BF16, BF16, F16]),
    context=st.sampled_from([*ON, *ON, *OFF]),
    kernels=st.sampled_from(["", "", "float32"]),
)
@pytest.mark.filterwarnings("ignore")
def test_p1_any_call_gives_what_its_casts_written_out_give(chosen: Any, rule: str, low: torch.dtype, context: str, kernels: str) -> None:
    off, cases = context in OFF, []
    drawn = [found for found in (drawn_call(*each) for each in chosen) if found is not None]
    names = {call.name for call, _, _ in drawn if listable(call.name)}
    policy, lists = policy_of(names, rule, low)
    with warnings.catch_warnings(), processor(kernels):
        warnings.simplefilter("ignore")
        for call, sample, generator in drawn:
            cases += drawn_case(call, sample, generator, lists.of(call.name) if call.name in names else None, low, off)
        lines = complaints(cases, policy, (ON | OFF)[context], off)
        assert not lines, "\n".join(lines)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("rule", "low", "kernels"),
    [
        *((rule, low, "float32") for rule in ("bf16", "promote", "unlisted") for low in (BF16, F16)),
        *((rule, low, "") for rule, low in [("bf16", F16), *((rule, BF16) for rule in RULES)]),
    ],
)
def test_p1_odd_calls_give_what_their_casts_written_out_give(rule: str, low: torch.dtype, kernels: str) -> None:
    """Each odd call in four mixtures of dtypes and kinds."""
    names = set(filter(listable, (call.name.rstrip("_") for call, _ in odd_calls())))
    policy, lists = policy_of(names, rule, low)
    cases = []
    with processor(kernels):
        for number in range(4):
            for call, sample in odd_calls():
                generator = random.Random(f"{call.op}{call.variant}{number}")
                cases += drawn_case(call, sample, generator, lists.of(call.name), low, False)
        lines = complaints(cases, policy, ON["casts"], False)
    assert not lines, "\n".join(lines)
