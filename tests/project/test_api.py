"""The public names, which wait for nothing and are what they are in whatever order things are imported; and Habana's own call."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hmp
from process_kit import alone, run_in_another_process

ROOT = Path(__file__).parents[2]
NAMES = """convert revert is_converted casts apply remove disable_casts enable_casts casts_enabled Policy policies explain bf16_function
    fp32_function promote_function register fallbacks benchmark compare tune detect_nonfinite cache_info
    set_cache_limit set_sharing clear_cache HmpError OpListError NonFiniteError"""


def test_public_names_are_there_and_have_docstrings() -> None:
    for name in NAMES.split():
        assert name in hmp.__all__
        assert inspect.getdoc(getattr(hmp, name)), name


def test_from_hmp_import_hmp_works() -> None:
    from hmp import hmp as package

    assert package is hmp


def test_convert_takes_habanas_arguments_by_position_and_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("linear\n")
    (tmp_path / "b.txt").write_text("softmax\n")
    paths = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    x = torch.randn(2, 2)
    for convert in (
        lambda: hmp.convert("O1", *paths, False),
        lambda: hmp.convert(opt_level="O1", bf16_file_path=paths[0], fp32_file_path=paths[1], isVerbose=False),
    ):
        with convert():
            assert hmp.is_converted()
            assert torch.nn.functional.linear(x, x).dtype is torch.bfloat16
            assert (x @ x).dtype is torch.float32  # not on this list
            assert torch.softmax(x.bfloat16(), 0).dtype is torch.float32
        assert not hmp.is_converted()


@pytest.mark.slow
def test_importing_hmp_waits_for_nothing_and_brings_torch_and_the_standard_library_alone() -> None:
    script = """if True:
        import pickle, sys, types
        import hmp
        assert "torch" not in sys.modules
        assert pickle.loads(pickle.dumps(hmp)) is hmp and hmp.HmpError and "torch" not in sys.modules
        import torch
        before = set(sys.modules)
        hmp.convert
        print(*(name for name in set(sys.modules) - before if name.startswith("torch")))
        hmp.convert(); torch.ones(2, 2) @ torch.ones(2, 2); hmp.explain("mul"); hmp.revert()
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        torchs = {"torch", "sympy", "mpmath"}  # torch 2.7 imports sympy with torch.utils.checkpoint
        print(sorted(new - set(sys.stdlib_module_names) - torchs - {"hmp"}))
        print([name for name in sys.modules if name.startswith(("hmp.benchmark.", "hmp.tune.", "hmp.numerics"))])
        assert all(getattr(hmp, name) is not None for name in hmp.__all__) and set(hmp.__all__) < set(dir(hmp))
        assert type(hmp) is types.ModuleType
        print(sorted(name for name in hmp.__all__ if isinstance(getattr(hmp, name), types.ModuleType)))
    """
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    late, others, not_asked_for, modules = run.stdout.splitlines()
    assert set(late.split()) <= {"torch.nn.utils.prune", "torch.utils._device"}
    assert (others, not_asked_for, modules) == ("[]", "[]", "['hmp']")


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
