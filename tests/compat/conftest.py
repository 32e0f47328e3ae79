"""Other packages as these tests need them: Habana's names without Habana, and no settings that accelerate keeps for the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def hpu_on_cpu() -> Iterator[Any]:
    """Habana's names, with the CPU for "hpu"."""
    from hmp.compat import habana

    with habana.install("cpu") as shim:
        yield shim


@pytest.fixture
def no_lists_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOWER_LIST", "FP32_LIST", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def accelerates_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, and none is left: earlier releases of transformers write it into the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


@pytest.fixture
def forget_accelerator() -> Iterator[Callable[[], None]]:
    """Forgets an Accelerator's settings, which are the process's, for good; at the end it is done too."""
    state = pytest.importorskip("accelerate.state")

    def forget() -> None:
        for each in (state.AcceleratorState, state.GradientState, state.PartialState):
            each._reset_state()

    yield forget
    forget()
