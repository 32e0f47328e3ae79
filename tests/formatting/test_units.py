"""Numbers and rows as tables and messages show them."""

from __future__ import annotations

import pytest

from hmp.formatting import aligned, duration


@pytest.mark.parametrize(("seconds", "shown"), [(0, "-"), (12.34, "12.3 s"), (0.25, "250 ms"), (2e-6, "2 us"), (5e-8, "0.05 us")])
def test_a_duration_has_three_digits_in_the_largest_unit_that_it_reaches(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_words_are_aligned_left_numbers_right_and_nothing_is_cut() -> None:
    rows = [("op", "calls", "where"), ("a long name → " * 20, "7", "[head]"), ("mm", "12,000", "")]
    wide = len(rows[1][0])
    assert aligned(rows, {0, 2}) == [f"{'op':{wide}}   calls  where", f"{rows[1][0]}       7  [head]", f"{'mm':{wide}}  12,000"]
