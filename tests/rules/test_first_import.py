"""The first convert() of a process, which imports most of hmp, inside whatever mode of torch: what it uses again is as elsewhere."""

from __future__ import annotations

import pytest

from process_kit import ROOT, run_in_another_process

_SCRIPT = """
from low_kernels_kit import as_computed
from torch._subclasses.fake_tensor import FakeTensorMode

def convert(value):
    hmp.convert(policy="torch-cpu")
    return value

x, weight = torch.randn(8, 64), torch.nn.Parameter(torch.randn(64, 64))
{first}
with torch.no_grad(), hmp.casts("torch-cpu"):
    first = [F.linear(x, weight) for _ in range(3)][-1]
    weight.mul_(2)
    second, view = F.linear(x, weight), F.linear(x.view(2, 4, 64)[0], weight)
hmp.revert()
low = lambda x, weight: as_computed(F.linear)(x.bfloat16(), weight.detach().bfloat16())
assert torch.equal(second, low(x, weight)), "stale"
assert torch.equal(view, low(x[:4], weight)), "of a view"
assert torch.equal(first, low(x, weight / 2)), "first"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "with torch.inference_mode(): convert(x)",
        "with FakeTensorMode(): convert(x)",
        "torch.func.grad(convert)(torch.ones(()))",
        "torch.jit.trace(convert, x)",
    ],
)
def test_the_first_convert_inside_a_mode_is_as_one_outside(first: str) -> None:
    run_in_another_process(_SCRIPT.format(first=first), path=str(ROOT / "tests" / "support"))
