"""The first convert() of a process, which imports most of hmp, inside whatever mode of torch: what it counts and keeps is as elsewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import torch, torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import hmp

x, weight = torch.randn(8, 64), torch.nn.Parameter(torch.randn(64, 64))
with {mode}:
    hmp.convert(policy="torch-cpu")
with torch.no_grad():
    first = [F.linear(x, weight) for _ in range(3)][-1]
    kept = hmp.cache_info().entries
    weight.data.mul_(2)
    second = F.linear(x, weight)
    view = F.linear(x.view(2, 4, 64)[0], weight)
hmp.revert()
low = weight.detach().bfloat16()
assert torch.equal(second, F.linear(x.bfloat16(), low)), "stale"
assert torch.equal(view, F.linear(x[:4].bfloat16(), low)), "of a view"
assert torch.equal(first, F.linear(x.bfloat16(), (weight.detach() / 2).bfloat16())), "first"
from hmp.caches import write_marks
print(kept, write_marks._SOLE_OWNER, write_marks._SOLE_HOLDER, write_marks._HOLDER_OF_A_BASE)
"""


def _counts(mode: str) -> str:
    script = _SCRIPT.format(mode=mode)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["torch.inference_mode()", "FakeTensorMode()", "torch.device('meta')"])
def test_the_first_convert_inside_a_mode_is_as_one_outside(mode: str) -> None:
    assert _counts(mode) == _counts("torch.enable_grad()")
