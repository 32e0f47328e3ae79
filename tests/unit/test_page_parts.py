"""Places that a report tells apart, what its page adds up, the page of compared captures.

No public call shows a page's parts as values, nor makes a comparison of captures with given distances.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import page_kit
from hmp.tools.record import page as model
from hmp.tools.traces.compare import CaptureComparison, Computed, Gap, Side
from page_kit import NASTY, Page, html_of, said


def test_the_tree_has_the_sums_of_what_is_below() -> None:
    tree = model.tree(page_kit.ROWS)
    layer = tree.branches["net"].branches["layer"].branches["0"]
    assert (layer.sums.calls, layer.sums.casts, layer.sums.casts_saved, layer.sums.cast_bytes) == (10, 6, 0, 4608)
    assert (layer.sums.cast_seconds, layer.sums.op_seconds) == (pytest.approx(0.08), pytest.approx(0.323))
    assert tree.sums.casts == sum(row.casts for row in page_kit.ROWS)


SIDE = Side("trainer", "trainer.capture", "Net", {"float32": 3}, {"float32": 2, "bfloat16": 1}, ("habana",), {"model": "Net"})
WIDE, LOW = Computed(("float32",), ("float32",), "float32", (2, 4)), Computed(("float32",), ("bfloat16",), "bfloat16", (2, 4))


def gap(module: str, relative: float | None, is_leaf: bool = True, why: str = "", **changes: object) -> Gap:
    how = "" if relative is None else "values"
    return replace(Gap(module, module, "Linear", 0, 0, is_leaf, "", WIDE, LOW, relative, how, why), **changes)


GAPS = (
    gap("(inputs)", 0.0, kind="", output="x"),
    gap("layers.0.a", 0.002),
    gap(f"layers.0.{NASTY}", 0.2),
    gap("layers.0", 0.01, False),
    gap("layers.1.a", float("inf")),
    gap("layers.1", 0.02, False),
    gap("odd", None, why="shapes [2] and [3]"),
    gap("", 0.05, False, output="y"),
)


def test_it_is_well_formed_and_says_what_the_comparison_says() -> None:
    comparison = CaptureComparison(SIDE, replace(SIDE, name=NASTY), GAPS, notes=("A note.",))
    html = html_of(comparison)
    page, text = Page(html), said(html)
    assert len(page.ids) == len(set(page.ids)) and NASTY not in html
    assert all(url.startswith(("#", "data:")) for url in page.urls) and {url[1:] for url in page.urls if url[0] == "#"} <= set(page.ids)
    for told in ("layers.0.a (Linear): by 0.002", "0.05", "policy 'habana'", "A note.", f"layers.0.{NASTY}", "shapes [2] and [3]"):
        assert told in text, told
