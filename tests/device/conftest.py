"""The files on_*.py ask what tests/rules cannot, on the device that HMP_TEST_DEVICE names. `.ci/device` runs them; one runs alone by

    HMP_TEST_DEVICE=cuda python -m pytest tests/device/on_caches.py

What a test prints about the device goes into the page of results.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import device_kit
import hmp


@pytest.fixture(autouse=True, scope="module")
def torch_is_as_it_was() -> Iterator[None]:
    """Without the comparison of tests/conftest.py: a device changes torch when it is first used."""
    yield
    hmp.revert()


@pytest.fixture(autouse=True)
def errors_of_kernels_arrive() -> Iterator[None]:
    yield
    device_kit.synchronize()
