"""A pytest plugin (`-p processor_seconds`): a test that takes more than HMP_TEST_SECONDS of the processor fails. See `.ci/nightly`."""

import os
from collections.abc import Iterator

import pytest

MOST = float(os.environ["HMP_TEST_SECONDS"])


def _now() -> float:
    """The processor seconds of this process and of those that it started and has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that passed, but took too long."""
    began = _now()
    result = yield
    if (taken := _now() - began) > MOST:
        pytest.fail(f"{taken:.1f} processor seconds of {MOST:.1f} for a default test: make it smaller, or mark it slow", pytrace=False)
    return result
