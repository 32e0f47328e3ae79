"""The demo: its lists took effect as torch itself sees it.

No public call gives the demo's model.
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
    lists = hmp.Policy.load(digits.POLICY)
    assert ATEN.keys() <= lists.fp32 | lists.bf16
    training = digits.Training(0)
    with hmp.casts(policy) if policy else hmp.disable_casts(), Ran() as ran:
        torch.nn.functional.cross_entropy(training.model(training.images[:8]), training.labels[:8])
    for name, ops in ATEN.items():
        for op in ops:
            assert ran.dtypes[op] == {BF16 if policy and name in lists.bf16 else FP32}, (name, op)
