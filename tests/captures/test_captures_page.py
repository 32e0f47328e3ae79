"""The page of two captures: one well-formed file that asks for no other, with what the comparison says, and nothing taken for HTML."""

from __future__ import annotations

from dataclasses import replace

from hmp.captures.comparison import CaptureComparison, Computed, Gap, Side
from hmp.captures.page import captures_page
from page_kit import NASTY, Page, said

SIDE = Side("trainer", "trainer.capture", "Net", {"float32": 3}, {"float32": 2, "bfloat16": 1}, ("habana",), (), {"model": "Net"})
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
    html = captures_page(comparison)
    page, text = Page(html), said(html)
    assert len(page.ids) == len(set(page.ids)) and NASTY not in html
    assert all(url.startswith("#") or url == "data:," for url in page.urls) and {url[1:] for url in page.urls if url[0] == "#"} <= set(
        page.ids
    )
    assert (
        "They part first at layers.0.a (Linear): 0.002, float32 beside float32 → bfloat16" in text
        and "what the model returned, y, is 0.05 apart." in text
    )
    assert "weights float32; outputs float32 (2), bfloat16 (1); policy 'habana'" in text and "A note." in text
    assert f"layers.0.{NASTY} Linear" in text and " 0.002 0.2 100" in text, "where the gap grows: before, apart, times"
    assert "layers.1 " in text and "shapes [2] and [3]" in text and "one rounding to bfloat16" in text


def test_a_comparison_in_which_nothing_is_apart_has_a_page() -> None:
    for gaps, verdict in (((), "may part or not"), (GAPS[:1], "do not part"), ((gap("a", None, why="shapes"),), "may part or not")):
        assert f"They {verdict}" in said(captures_page(CaptureComparison(SIDE, SIDE, gaps)))
