"""Rows as lines with aligned columns."""

from __future__ import annotations

from hmp.formatting import aligned


def test_words_are_aligned_left_numbers_right_and_nothing_is_cut() -> None:
    rows = [("op", "calls", "where"), ("a long name → " * 20, "7", "[head]"), ("mm", "12,000", "")]
    wide = len(rows[1][0])
    assert aligned(rows, {0, 2}) == [f"{'op':{wide}}   calls  where", f"{rows[1][0]}       7  [head]", f"{'mm':{wide}}  12,000"]


def test_a_rule_is_as_long_as_the_heading() -> None:
    assert aligned([("op", "calls")], ruled=True) == ["op  calls", "---------"]
