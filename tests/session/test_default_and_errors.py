"""What casts where nobody names a policy: torch.autocast's lists in a region and a model, Habana's under convert(); what is refused."""

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


# --- what convert(), casts() and remove() refuse, with torch as it was


@pytest.mark.parametrize("policy", ["habana", hmp.Policy(bf16={"linear @ 0"})], ids=["without scopes", "with scopes"])
@pytest.mark.parametrize("given", [3, "model", torch.nn.Linear])
def test_a_model_that_is_no_module_is_refused(given: object, policy: hmp.Policy | str, torch_differences: Callable[[], list[str]]) -> None:
    kind = type(given).__name__
    with pytest.raises(hmp.HmpError, match=rf"convert\(model=\.\.\.\) takes a torch\.nn\.Module; {kind} is none"):
        hmp.convert(policy=policy, model=given)  # type: ignore[arg-type]
    with pytest.raises(hmp.HmpError, match=rf"casts\(model=\.\.\.\) takes a torch\.nn\.Module; {kind} is none"):
        hmp.casts(policy, model=given)  # type: ignore[arg-type]
    with pytest.raises(hmp.HmpError, match=rf"remove\(\) takes a torch\.nn\.Module; {kind} is none"):
        hmp.remove(given)  # type: ignore[type-var]
    assert torch_differences() == [] and not hmp.is_converted()


def test_a_list_file_that_is_no_path_is_refused(torch_differences: Callable[[], list[str]]) -> None:
    with pytest.raises(hmp.OpListError, match='3 is no path of a fp32 list; give that of a text file, or "" for the default list'):
        hmp.convert(fp32_file_path=3)  # type: ignore[arg-type]
    assert torch_differences() == [] and not hmp.is_converted()


def test_none_for_a_list_file_means_that_none_is_given() -> None:
    """What argparse gives a script for an option that was left out."""
    with hmp.convert("O1", None, None, False, promote_file_path=None, fp8_file_path=None):
        assert hmp.explain("linear") == hmp.explain("linear", "habana")
    with hmp.convert(policy="bert", bf16_file_path=None):
        assert hmp.explain("softmax").policy == "bert"
