"""The demo: its lists took effect as torch itself sees it, and its check tells an op that ran elsewhere.

No public call makes an op of the demo run elsewhere than its policy says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import hmp

pytest.importorskip("sklearn")

from hmp.cli.demo import digits

BF16, FP32 = torch.bfloat16, torch.float32
# The ATen ops in which a name of a list shows up, in a forward pass on the CPU.
ATEN = {
    "batch_norm": ("native_batch_norm",), "conv2d": ("convolution",), "cross_entropy": ("_log_softmax", "nll_loss_forward"),
    "dropout": ("bernoulli_",), "embedding": ("embedding",), "layer_norm": ("native_layer_norm",), "linear": ("addmm",),
    "matmul": ("bmm",), "mul": ("mul",), "relu": ("relu",), "softmax": ("_softmax",), "truediv": ("div",),
}  # fmt: skip


class Ran(TorchDispatchMode):
    """The ATen ops of a forward pass, with the dtypes of their first floating inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        floating = (each.dtype for each in tree_iter(args) if isinstance(each, torch.Tensor) and each.is_floating_point())
        for dtype in [*floating][:1]:
            self.dtypes.setdefault(func.overloadpacket.__name__, set()).add(dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.native_kernels
@pytest.mark.parametrize("policy", [None, digits.POLICY])
def test_each_listed_op_of_the_demo_runs_in_its_dtype_as_torch_sees_it(policy: str | None) -> None:
    wanted = digits.wanted()
    assert [*wanted] == [*ATEN] == digits.CALLS, "each op that the model calls is on one of the lists"
    training = digits.Training(0)
    with hmp.casts(policy) if policy else hmp.disable_casts(), Ran() as ran:
        torch.nn.functional.cross_entropy(training.model(training.images[:8]), training.labels[:8])
    for name, dtype in wanted.items():
        for op in ATEN[name]:
            assert ran.dtypes[op] == {dtype if policy else FP32}, (name, op)


def test_the_check_names_the_op_that_ran_elsewhere_and_the_one_that_was_not_called() -> None:
    training = digits.Training(0)
    with hmp.convert(policy=hmp.Policy.load(digits.POLICY).move("linear", "fp32")), hmp.record() as report:
        training.step(slice(8))
    (failure,) = digits.failed_ops(report)
    assert failure.startswith("linear did not compute in bfloat16 in 3 calls")
    assert len([*digits.failed_ops(hmp.Report())]) == len(digits.CALLS) + 1
