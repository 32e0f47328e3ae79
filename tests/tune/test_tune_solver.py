"""The integer programme beside every subset by brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmp.tune.decisions import Key
from hmp.tune.solver import Model, solve

KEYS = [Key(name) for name in "abcdef"]
COSTS = st.floats(-10, 10).map(lambda x: round(x, 3))


@st.composite
def models(draw: st.DrawFn) -> Model:
    keys = KEYS[: draw(st.integers(1, 6))]
    pairs = [pair for pair in itertools.permutations(keys, 2) if draw(st.booleans())]
    return Model(
        {key: draw(COSTS) for key in keys},
        {pair: abs(draw(COSTS)) for pair in pairs},
        {key: draw(st.one_of(st.floats(0, 1).map(lambda x: round(x, 3)), st.just(math.inf))) for key in keys},
    )


def cost(model: Model, low: frozenset[Key]) -> float:
    crossing = sum(c for (a, b), c in model.flows.items() if (a in low) != (b in low))
    return sum(model.costs[key] for key in low) + crossing


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(models(), st.one_of(st.just(math.inf), st.floats(0, 2)), st.data())
def test_no_subset_that_is_allowed_costs_less(model: Model, limit: float, data: st.DataObject) -> None:
    keys = list(model.costs)
    barred = frozenset(data.draw(st.sets(st.sampled_from(keys), max_size=2)))
    failed = [frozenset(data.draw(st.sets(st.sampled_from(keys), min_size=1)))] if data.draw(st.booleans()) else []

    def allowed(low: frozenset[Key]) -> bool:
        # a little room: the solver's own tolerance is 1e-6 of the bound
        within = sum(model.sensitivities[key] for key in low) <= limit * (1 + 1e-5) + 1e-9 if low else True
        return (
            within
            and not low & barred
            and not any(each <= low for each in failed)
            and all(math.isfinite(model.sensitivities[key]) for key in low)
        )

    subsets = (frozenset(s) for size in range(len(keys) + 1) for s in itertools.combinations(keys, size))
    best = min(cost(model, low) for low in subsets if allowed(low))
    found = solve(model, limit=limit, barred=barred, failed=failed)
    assert allowed(found)
    assert cost(model, found) == pytest.approx(model.cost(found))
    assert cost(model, found) <= best + 1e-4 * max(1.0, abs(best))


def test_nothing_to_decide_is_no_choice() -> None:
    assert solve(Model({}, {}, {})) == frozenset()
