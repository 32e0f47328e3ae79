"""torch's tables of overridable functions are those of torch alone, whoever fills them and when."""

from __future__ import annotations

import pytest

from process_kit import run_in_another_process

PLAIN = """
from torch import overrides

def tables():
    functions, names = overrides._get_overridable_functions()
    return list(overrides.get_testing_overrides()), list(functions.items()), list(names.items())

def empty():
    overrides.get_testing_overrides.cache_clear()
    overrides._get_overridable_functions.cache_clear()

plain = tables()
empty()
"""


@pytest.mark.slow
def test_r16_tables_that_are_filled_while_converted_or_after_revert_hold_torchs_own_functions() -> None:
    run_in_another_process(
        f"""
{PLAIN}
for lists in ("habana", "torch-cpu"):
    with hmp.convert(policy=lists):
        assert tables() == plain
        assert torch.overrides.get_testing_overrides()[torch.Tensor.add_.__wrapped__]
    assert tables() == plain
    empty()
    hmp.revert()
    assert tables() == plain
    empty()
"""
    )
