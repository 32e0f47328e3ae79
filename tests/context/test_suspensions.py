"""R17: whatever the order in which regions of torch.autocast and policies inside them end, each thread's state is that of what is open."""

from __future__ import annotations

import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

import hmp
from autocast_kit import real_state
from innermost_kit import FULL, OFF, autocast


def in_casts():
    with hmp.casts(FULL):
        yield


STEPS = st.lists(st.tuples(st.sampled_from(["region", "island", "leave", "begin", "begin", "end"]), st.integers(0, 3)), max_size=14)


@given(STEPS)
def test_r17_any_order_of_ends_leaves_what_is_open(steps):
    """Regions end innermost first, as `with` has it; generators inside `casts()` end in any order."""
    opened: list[tuple[str, object]] = []  # in order; the innermost one that is open decides
    for step, number in steps:
        if step in ("region", "island"):
            region = torch.autocast("cpu", dtype=torch.bfloat16, enabled=step == "region")
            region.__enter__()
            opened.append((step, region))
        elif step == "begin":
            generator = in_casts()
            next(generator)
            opened.append(("casts", generator))
        elif step == "leave":
            found = next((each for each in reversed(opened) if each[0] != "casts"), None)
            if found is not None:
                opened.remove(found)
                found[1].__exit__(None, None, None)
        else:
            generators = [each for each in opened if each[0] == "casts"]
            if generators:
                ending = generators[number % len(generators)]
                opened.remove(ending)
                ending[1].close()
        assert real_state()[0][0] is bool(opened and opened[-1][0] == "region"), steps
    for kind, each in reversed(opened):
        each.close() if kind == "casts" else each.__exit__(None, None, None)
    assert real_state() == OFF


def test_r17_a_policy_that_another_thread_ended_is_over_at_the_next_end_of_a_region():
    with autocast():
        with autocast():
            generator = in_casts()
            next(generator)
            other = threading.Thread(target=generator.close)
            other.start()
            other.join()
        assert real_state()[0][0]
    assert real_state() == OFF
