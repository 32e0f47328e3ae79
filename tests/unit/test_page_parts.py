"""What the page of a report adds up, and the chart of a search.

No public call shows a page's parts as values.
"""

from __future__ import annotations

import pytest

import page_kit
import tune_result_kit
from hmp.tools.pages.page import TradeOff
from hmp.tools.record import page as model
from hmp.tools.tune.page import tuning_page


def test_the_tree_has_the_sums_of_what_is_below() -> None:
    tree = model.tree(page_kit.ROWS)
    layer = tree.branches["net"].branches["layer"].branches["0"]
    assert (layer.sums.calls, layer.sums.casts, layer.sums.casts_saved, layer.sums.cast_bytes) == (10, 6, 0, 4608)
    assert (layer.sums.cast_seconds, layer.sums.op_seconds) == (pytest.approx(0.08), pytest.approx(0.323))
    assert tree.sums.casts == sum(row.casts for row in page_kit.ROWS)


def test_the_chart_of_a_search_shows_a_smaller_loss_below_float32s_and_a_larger_one_above() -> None:
    trials = [tune_result_kit.trial(name, (), ratio=0.5, loss_change=change) for name, change in (("better", -0.0016), ("worse", 0.0016))]
    page = tuning_page(tune_result_kit.result(trials=(tune_result_kit.FLOAT32, *trials)))
    (figure,) = [part for section in page.sections for part in section.parts if isinstance(part, TradeOff)]
    assert [point.worse for point in figure.points] == [0.0, -0.0016, 0.0016] and figure.allowed == [0.01, -0.01]
