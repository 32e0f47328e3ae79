"""The public names, which wait for nothing and are what they are in whatever order things are imported; and Habana's own call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from process_kit import alone

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_importing_hmp_waits_for_nothing_and_brings_torch_and_the_standard_library_alone() -> None:
    script = """if True:
        import sys, types
        import hmp
        assert "torch" not in sys.modules
        assert type(hmp) is types.ModuleType and hmp.HmpError and "torch" not in sys.modules  # what pickles modules knows it by its type
        import torch
        before = set(sys.modules)
        hmp.convert
        print(*(name for name in set(sys.modules) - before if name.startswith("torch")))
        hmp.convert(); torch.ones(2, 2) @ torch.ones(2, 2); hmp.explain("mul"); hmp.revert()
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        torchs = {"torch", "sympy", "mpmath"}  # torch 2.7 imports sympy with torch.utils.checkpoint
        print(sorted(new - set(sys.stdlib_module_names) - torchs - {"hmp"}))
        lazy = tuple(f"hmp.tools.{name}." for name in ("benchmark", "tune", "compare", "nonfinite"))
        print([name for name in sys.modules if name.startswith(lazy)])
        assert all(getattr(hmp, name) is not None for name in hmp.__all__) and set(hmp.__all__) == set(dir(hmp)) and len(dir(hmp)) <= 30
        assert type(hmp) is types.ModuleType
        print(sorted(name for name in hmp.__all__ if isinstance(getattr(hmp, name), types.ModuleType)))
    """
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    late, others, not_asked_for, modules = run.stdout.splitlines()
    attention = {"torch.nn.attention._utils", "torch.nn.attention.flex_attention"}  # 5 ms
    assert set(late.split()) <= {"torch.nn.utils.prune", "torch.utils._device", *attention}
    assert (others, not_asked_for, modules) == ("[]", "[]", "[]")


@pytest.mark.slow
def test_a_compiled_function_may_be_the_first_to_ask(tmp_path: Path) -> None:
    code = "@torch.compile(backend='eager')\ndef f(x):\n    with hmp.disable_casts():\n        return x @ x\n"
    alone(tmp_path, f"import torch, hmp\n{code}assert f(torch.ones(2, 2)).dtype is torch.float32")
