"""The fixture `hmp_record` for pytest: what the test's own code ran in which precision. Imports torch when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .report.report import Report


@pytest.fixture
def hmp_record() -> Iterator[Report]:
    """A report of what runs while the test does: `hmp_record.assert_dtype("softmax", torch.float32)`."""
    import hmp

    with hmp.record() as report:
        yield report
