"""R17: whatever the order in which regions of torch.autocast and policies inside them end, each thread's state is that of what is open."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import hmp
from autocast_kit import real_state
from innermost_kit import FULL, OFF, autocast
from thread_kit import in_thread


def in_casts():
    with hmp.casts(FULL):
        yield


STEPS = st.lists(st.tuples(st.sampled_from(["region", "island", "leave", "begin", "begin", "end"]), st.integers(0, 3)), max_size=14)


@given(STEPS)
@example([("region", 0), ("island", 0), ("begin", 0), ("leave", 0)])
@example([("region", 0), ("begin", 0), ("region", 0), ("end", 0), ("leave", 0)])
def test_r17_any_order_of_ends_leaves_what_is_open(steps):
    """Regions end innermost first, as `with` has it; generators inside `casts()` end in any order."""
    opened: list[tuple[str, Any]] = []  # in order; the innermost one that is open decides
    try:
        for step, number in steps:
            if step in ("region", "island"):
                region = torch.autocast("cpu", dtype=torch.bfloat16, enabled=step == "region")
                region.__enter__()
                opened.append((step, region))
            elif step == "begin":
                generator = in_casts()
                next(generator)
                opened.append(("casts", generator))
            else:
                kinds = [each for each in opened if (each[0] == "casts") is (step == "end")]
                if kinds:
                    end(ending := kinds[number % len(kinds) if step == "end" else -1])
                    opened.remove(ending)
            assert real_state()[0][0] is bool(opened and opened[-1][0] == "region")
    finally:
        for each in reversed(opened):
            end(each)
    assert real_state() == OFF


def end(opened: tuple[str, Any]) -> None:
    opened[1].close() if opened[0] == "casts" else opened[1].__exit__(None, None, None)


def test_r17_a_policy_that_another_thread_ended_is_over_at_the_next_end_of_a_region():
    with autocast():
        with autocast():
            generator = in_casts()
            next(generator)
            in_thread(generator.close)
        assert real_state()[0][0]
    assert real_state() == OFF


def test_r16_revert_ends_what_a_generator_has_begun_and_its_end_changes_nothing():
    with autocast():
        generator = in_casts()
        next(generator)
        hmp.revert()
        assert real_state()[0][0]
    generator.close()
    assert real_state() == OFF


def test_r17_a_policy_in_a_thread_that_another_one_reverted_does_not_bring_a_region_back():
    states = []

    def run() -> None:
        with autocast():
            generator = in_casts()
            next(generator)
            in_thread(hmp.revert)
        generator.close()  # the region's end was not seen
        states.append(real_state())

    in_thread(run)
    assert states == [OFF]
