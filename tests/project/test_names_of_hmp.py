"""`import hmp` waits for nothing, and its names are what they are in whatever order things are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from process_kit import alone, run_in_another_process


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "first",
    ["import hmp.tune.search", "import hmp.benchmark.result", "from hmp.tune.recipe import load", "import hmp.cli, hmp.compat.habana", ""],
)
def test_functions_and_packages_of_one_name_are_told_apart(first: str) -> None:
    code = f"{first}\nimport hmp, inspect\nprint(inspect.isfunction(hmp.tune), inspect.isfunction(hmp.benchmark), hmp.tune.__module__)"
    assert run_in_another_process(f"del sys.modules['hmp']\n{code}", with_hmp=False, path=".").strip() == "True True hmp.tune"


@pytest.mark.slow
def test_a_compiled_function_may_be_the_first_to_ask(tmp_path: Path) -> None:
    code = "@torch.compile(backend='eager')\ndef f(x):\n    with hmp.disable_casts():\n        return x @ x\n"
    alone(tmp_path, f"import torch, hmp\n{code}assert f(torch.ones(2, 2)).dtype is torch.float32")
