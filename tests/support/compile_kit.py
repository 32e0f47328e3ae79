"""What the tests of torch.compile share: a backend that counts graphs, and the dtypes of what a function gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oracle import tensors
from torch_has import TORCH
from trap_kit import policy

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Where hmp does not know Dynamo what is compiled runs as in eager: nothing can be said of graphs.
BRIDGED = pytest.mark.skipif(torch.__version__ < (2, 13), reason="a torch whose Dynamo hmp does not know: there are no graphs")
# Below 2.11 what is compiled runs as in eager; in 2.11 hmp's casts are in the graph, but for these.
NOT_IN_2_11 = (2, 11) <= TORCH < (2, 13)
# Behind Dynamo, where hmp's part ends, AOTAutograd takes ten times as long: one test of each kind asks it before a change.
EACH_BACKEND = pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
# low and wide ops whose dtype tells which policy is in force
LOW = policy(bf16=["mul", "matmul", "linear", "relu"], fp32=["softmax"], name="low")
OTHER = policy(bf16=["softmax", "add"], fp32=["relu"], name="other")
HALF = policy(bf16=["mul", "matmul"], dtype=F16, name="half")


class Graphs:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.all: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.all.append(graph)
        return graph.forward

    def __len__(self) -> int:
        return len(self.all)

    def calls(self) -> list[str]:
        """The names of what the latest graph calls, in order."""
        nodes = [node for node in self.all[-1].graph.nodes if node.op.startswith("call")]
        return [node.target if isinstance(node.target, str) else node.target.__name__ for node in nodes]


def dtypes(result: Any) -> list[torch.dtype]:
    """The dtypes of the tensors of a result, which is one or a tuple of some."""
    return [t.dtype for t in tensors(result)]
