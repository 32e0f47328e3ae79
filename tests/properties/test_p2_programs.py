"""P2, random programs: after every statement, all tensors that are alive are what explicit casts make them.

Oracle: `programs.Interpreter`, which runs the same statements in plain torch with `.to()` before each op, before anything was patched.
Views are views whatever a list says, so every write through one arrives (R10). Errors of torch's are the same, and so are the leaves'
gradients at the end (R13).
Rules R1 to R8, R10, R14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hmp
from low_kernels_kit import processor
from oracle import BF16, F32, unlike
from programs import ANOTHER, Program, Statement, Step, as_written, by_hand, gradients, programs

OTHER = hmp.Policy("another", **{kind: {n for n, k in ANOTHER.items() if k == kind} for kind in ("bf16", "fp32")})


CONTEXTS: dict[str, tuple[Callable[[], Any], ...]] = {
    "": (),
    "off": (hmp.disable_casts,),
    "on in off": (hmp.disable_casts, hmp.enable_casts),
    "another": (lambda: hmp.casts(OTHER),),
}


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return not unlike(got.detach().as_subclass(torch.Tensor), want.detach().as_subclass(torch.Tensor))


def check(*together: Program) -> None:
    """The oracle of every program first, on a torch that nothing has patched; then all of them in one conversion."""
    hmp.revert()
    prepared = [(program, program.pool(), *by_hand(program)) for program in together]
    with hmp.convert(policy=hmp.Policy("nothing listed")):
        for each in prepared:
            run(*each)
    hmp.revert()


def run(program: Program, pool: list[torch.Tensor], steps: list[Step], wanted: Any) -> None:
    policy = hmp.Policy("drawn", dtype=program.low, **{kind: program.names(kind) for kind in ("bf16", "fp32", "promote")})
    leaves = [t for t in pool if t.requires_grad]
    with hmp.casts(policy):
        for statement, step in zip(program.statements, steps, strict=False):
            raised: BaseException | None = None
            try:
                with contextlib.ExitStack() as stack:
                    for context in CONTEXTS[statement.context]:
                        stack.enter_context(context())
                    as_written(pool, statement)
            except (RuntimeError, TypeError, hmp.HmpError) as error:
                raised = error
            judged(raised, statement, step)
            if step.may_be_refused:
                if raised is None and step.error is None:
                    compare(pool, step.pool, statement)
                return
            with hmp.disable_casts():
                compare(pool, step.pool, statement)
        got = gradients(pool, leaves)
    if wanted is not None:
        assert got is not None, "backward raises under hmp alone"
        for leaf, one, other in zip(leaves, got, wanted, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.dtype is leaf.dtype and same(one, other)), f"gradient: {one}, explicit casts give {other}"


def judged(raised: BaseException | None, statement: Statement, step: Any) -> None:
    """Whether this error, or none, is what the rules ask for."""
    if step.may_be_refused:
        return
    if step.error is None:
        assert raised is None, f"{statement}: {type(raised).__name__}: {raised}"
    else:
        assert isinstance(raised, step.error) and not isinstance(raised, hmp.HmpError), f"{statement}: got {raised!r}, torch {step.error}"


def compare(pool: list[torch.Tensor], want: list[torch.Tensor], statement: Statement) -> None:
    assert len(pool) == len(want)
    for number, (one, other) in enumerate(zip(pool, want, strict=True)):
        assert same(one, other), f"after {statement}: tensor {number} is {one}, explicit casts give {other}"


def lines(*statements: tuple[Any, ...]) -> tuple[Statement, ...]:
    return tuple(Statement(kind, name, pool, *rest) for kind, name, pool, *rest in statements)


VIEW_OF_A_VIEW = lines(("view", "t", (0, 0, 0)), ("view", "slice", (2, 0, 0)), ("in place", "x[0] = y[1]", (3, 1, 0)))
TWO = {"low": BF16, "dtypes": (F32, F32), "leaves": (False, False)}


@settings(max_examples=max(3, settings.default.max_examples // 2))
@example([Program((("t", "bf16"),), statements=VIEW_OF_A_VIEW, **TWO)], "")
@given(st.lists(programs(), min_size=6, max_size=12), st.sampled_from(["", "", "float32"]))
@pytest.mark.filterwarnings("ignore")
def test_p2_every_statement_is_what_explicit_casts_make_it(together: list[Program], kernels: str) -> None:
    with processor(kernels):
        check(*together)
