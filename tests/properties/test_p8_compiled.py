"""P8, compiled equals eager: a program under torch.compile gives what explicit casts give, and goes on to do so when the policy around it
changes.

Oracle: `programs.by_hand`, the interpreter of explicit casts. The backend is "eager" with `fullgraph=True`: Dynamo's tracing is asked, and
no compiler. Rules R1 to R4, R7, R14 in traced code.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import hmp
from programs import Program, as_written, by_hand, programs
from test_p2_programs import same


def policy_of(program: Program) -> hmp.Policy:
    return hmp.Policy("drawn", dtype=program.low, **{kind: program.names(kind) for kind in ("bf16", "fp32", "promote")})


@pytest.mark.native_kernels  # test_r11_no_instructions.py asks of products that compute in float32
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=max(2, settings.default.max_examples // 3))
@given(program=programs(writes=False, contexts=False))
def test_p8_a_compiled_program_gives_what_explicit_casts_give(program: Program, fresh_compiler: Any) -> None:
    torch._dynamo.reset()
    hmp.revert()
    program = dataclasses.replace(program, leaves=(False,) * len(program.leaves))
    unlisted = dataclasses.replace(program, lists=())
    other = dataclasses.replace(program, lists=(*((name, "fp32") for name, _ in program.lists),))
    wanted = [(each, by_hand(each)[0]) for each in (program, unlisted, other, program)]

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        pool = list(given)
        for statement in program.statements:
            as_written(pool, statement)
        return pool

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for each, steps in wanted:
        if any(step.error for step in steps):
            return
        given_, again = each.pool(), each.pool()  # made outside: the policy lists what makes them
        with hmp.casts(policy_of(each)):
            pool = compiled(*given_)
        for one, other_ in zip(pool, steps[-1].pool, strict=True):
            assert same(one, other_), f"under {each.lists}: {one}, explicit casts give {other_}"
        try:
            plain = run(*each.pool())
        except RuntimeError:
            continue  # torch refuses the mixture, where nothing is cast
        with hmp.casts(policy_of(each)), hmp.disable_casts():
            off = compiled(*again)
        for one, other_ in zip(off, plain, strict=True):
            assert same(one, other_)
