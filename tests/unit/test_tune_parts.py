"""Parts of a search: a level beside planted units that are too many, and what a search says of its result.

No public call chooses what fits and what does not, and a search for each answer takes minutes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hmp
import tune_result_kit
from hmp.core import lists
from hmp.tools.tune.decisions import Key
from hmp.tools.tune.levels import greedy_order, search_level
from tune_kit import sgd


def test_the_table_has_the_choice_the_trials_the_units_and_how_it_ended() -> None:
    text = str(tune_result_kit.result())
    for each in ("linear", "matmul", "0.62", "habana", "autocast", "loss +4.00%, 1.00% allowed", "One note.", "seed 0"):
        assert each in text, each
    assert "no bound" in str(tune_result_kit.bare())
    assert "budget is spent" in str(tune_result_kit.result(stopped="budget"))
    assert "the same call continues from here" in str(tune_result_kit.result(stopped="interrupted"))
    slow = tune_result_kit.trial("slow", ("linear",), ratio=1.25)
    assert "Stay in float32" in str(tune_result_kit.result(best=slow))
    assert "0.71 of float32's bytes" in str(tune_result_kit.result(objective="memory"))


UNITS = st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 10)), max_size=12)


def searched(changes: dict[Key, float], order: list[Key], limit: float, allowed) -> tuple[frozenset[Key], list[Key], int]:
    """What fits in the end, what was barred, and how many sets were tried."""
    tried: dict[frozenset[Key], bool] = {frozenset(): True}
    barred: list[Key] = []

    def fits(units: frozenset[Key], last: Key | None) -> bool:
        return tried.setdefault(units, allowed(units))

    search_level(order, changes, limit, fits, barred.append)
    return max((units for units, is_good in tried.items() if is_good), key=len), barred, len(tried) - 1


@given(UNITS, st.sets(st.integers(0, 11), max_size=3), st.floats(0, 3))
def test_units_that_fit_with_no_other_are_found_and_all_others_stay(given: list, culprits: set[int], limit: float) -> None:
    changes, gains = ({Key(f"op{at}"): pair[which] for at, pair in enumerate(given)} for which in (0, 1))
    order = greedy_order(gains, changes)
    planted = {Key(f"op{at}") for at in culprits} & set(order)
    found, barred, tried = searched(changes, order, limit, lambda units: not units & planted)
    assert found == frozenset(order) - planted and set(barred) == planted
    assert tried <= 2 + len(planted) * (1 + len(order).bit_length())


@given(UNITS, st.floats(0, 3), st.floats(0, 3))
def test_what_is_left_out_is_one_too_many(given: list, limit: float, bound: float) -> None:
    """Changes add up, and the bound that holds is another than the one that is expected."""
    changes, gains = ({Key(f"op{at}"): pair[which] for at, pair in enumerate(given)} for which in (0, 1))
    order = greedy_order(gains, changes)
    found, barred, _ = searched(changes, order, limit, lambda units: sum(changes[key] for key in units) <= bound)
    assert found | set(barred) == set(order)
    for key in barred:
        assert sum(changes[each] for each in {*found, key}) > bound - 1e-9


def test_what_changes_least_for_its_gain_comes_first_and_what_gains_nothing_not_at_all() -> None:
    gains = {Key("a"): 1.0, Key("b"): 4.0, Key("c"): 0.0, Key("d"): 2.0, Key("e"): 1.0}
    changes = {Key("a"): 0.1, Key("b"): 0.2, Key("c"): 0.0, Key("d"): float("inf"), Key("e"): 0.0}
    assert greedy_order(gains, changes) == [Key("e"), Key("b"), Key("a")]


@pytest.mark.slow
def test_where_fp8_is_computed_it_must_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(lists.kind_of("fp8").level), "has_kernels", lambda *_: True)
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 3)), [torch.randn(16, 32) for _ in range(2)]
    given = {"loss": lambda m, x: m(x).square().mean(), "optimizer": sgd, "steps": 12, "tolerance": 0.1}
    result = hmp.tune(model, batches, levels=("fp8", "bf16", "fp32"), objective="time", **given)
    assert any(trial.fp8 and trial.fits and trial.ratio is not None for trial in result.trials)
    assert not result.policy.fp8 and any("FP8" in note for note in result.notes)
