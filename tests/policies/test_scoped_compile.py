"""Scoped lines under torch.compile and torch.export: the dtypes and values of eager, in one graph, guarded on what is in force."""

from __future__ import annotations

import pytest
import torch

import hmp
from compile_kit import BF16, EACH_BACKEND, F32, same_results

pytestmark = pytest.mark.usefixtures("fresh_compiler")
P = hmp.Policy("scoped", bf16={"linear", "softmax"}, fp32={"softmax @ decoder", "linear @ *.1.linear"})
X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, torch.softmax(y, -1)


class Net(torch.nn.Module):
    """Gives what linear and softmax gave in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.ModuleList(Block() for _ in range(2))
        self.decoder = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: list[torch.Tensor] = []
        for block in (*self.encoder, *self.decoder):
            found += block(x)
            x = found[-2].float()
        return tuple(found)


UNDER_P = [BF16, BF16, F32, BF16, BF16, F32, F32, F32]


def dtypes(result: tuple[torch.Tensor, ...]) -> list[torch.dtype]:
    return [each.dtype for each in result]


@EACH_BACKEND
def test_scope_an_applied_model_compiles_to_one_graph_with_eagers_results_and_gradients(backend: str):
    model = hmp.apply(Net(), P)

    def gradients(called) -> list[torch.Tensor]:
        model.zero_grad()
        results = called(X)
        assert dtypes(results) == UNDER_P
        sum(each.float().square().sum() for each in results).backward()
        return [*(each.detach() for each in results), *(p.grad.clone() for p in model.parameters())]

    wanted = gradients(model)
    same_results(gradients(torch.compile(model, backend=backend, fullgraph=True)), wanted)
