"""Places that a report tells apart, what its page adds up, the page of compared captures.

No public call shows a page's parts as values, nor makes a comparison of captures with given distances.
"""

from __future__ import annotations

import pytest

import page_kit
import tune_result_kit
from hmp.tools.pages.page import TradeOff
from hmp.tools.record import page as model
from hmp.tools.tune.page import tuning_page
from page_kit import NASTY, Page, html_of, said


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


def test_it_is_well_formed_and_says_what_the_comparison_says() -> None:
    comparison = page_kit.captures()
    html = html_of(comparison)
    page, text = Page(html), said(html)
    assert len(page.ids) == len(set(page.ids)) and NASTY not in html
    assert all(url.startswith(("#", "data:")) for url in page.urls) and {url[1:] for url in page.urls if url[0] == "#"} <= set(page.ids)
    for told in ("layers.0.a (Linear): by 0.002", "0.05", "policy 'habana'", "A note.", f"layers.0.{NASTY}", "shapes [2] and [3]"):
        assert told in text, told
