"""Numbers as tables and messages show them."""

from __future__ import annotations

import pytest

from hmp.formatting import duration


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "-"), (12.34, "12.3 s"), (1, "1 s"), (0.25, "250 ms"), (1.5e-3, "1.5 ms"), (2e-6, "2 us"), (5e-8, "0.05 us")],
)
def test_a_duration_has_three_digits_in_the_largest_unit_that_it_reaches(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
