"""What casts where nobody names a policy: torch.autocast's own lists in a region and in a model, Habana's under convert()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hmp

LOSSES = 5


class Net(nn.Module):
    """Products, a norm, a softmax, and a `*` that torch.autocast leaves alone and Habana's list does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.full((16,), 1.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.relu(self.norm(self.first(x))) * self.scale), -1)


def losses(model: nn.Module, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(LOSSES):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with around():
            out = model(x)
        loss = (out.float() - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_a_region_and_an_applied_model_train_as_under_torch_autocast(net: Net) -> None:
    expected = losses(copy.deepcopy(net), lambda: torch.autocast("cpu", torch.bfloat16))
    assert expected != losses(copy.deepcopy(net)), "float32 would pass too"
    assert expected != losses(copy.deepcopy(net), lambda: hmp.casts("habana")), "Habana's list would pass too"
    assert losses(copy.deepcopy(net), hmp.casts) == expected
    assert losses(hmp.apply(copy.deepcopy(net))) == expected

    @hmp.casts
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return net(x)

    x = torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(x), decorated(x))


def test_convert_keeps_the_list_that_habana_published() -> None:
    x = torch.ones(2, 2)
    with hmp.casts():
        assert ((x * x).dtype, (x @ x).dtype) == (torch.float32, torch.bfloat16)
    with hmp.convert():
        assert ((x * x).dtype, (x @ x).dtype) == (torch.bfloat16, torch.bfloat16)


def test_a_comparison_is_under_the_same_lists(net: Net) -> None:
    x = torch.randn(4, 8)
    low = {row.op for row in hmp.compare(net, x).rows if row.dtype == "bfloat16" and row.listed}
    assert low == {"linear"}
