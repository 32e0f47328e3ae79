"""A graph that is captured takes the copies away for good: its replays write by address (R18). A class of torch's stands in for CUDA's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hmp
from hmp.caches import mark_proof


def test_r18_the_first_capture_frees_the_copies_and_no_memory_of_that_device_is_marked_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    class CUDAGraph:
        def capture_begin(self, *args: Any) -> None:
            begun.append(args)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(mark_proof, "_captured", set())
    own, layer, x = CUDAGraph.capture_begin, torch.nn.Linear(4, 4), torch.randn(2, 4)
    with hmp.convert(policy="torch-cpu"), torch.no_grad():
        layer(x)
        assert hmp.cache_info().entries == 2
        CUDAGraph().capture_begin("pool")
        assert hmp.cache_info().entries == 0
        assert mark_proof.refusal(torch.device("cuda")) == "captured graph"
        assert torch.equal(layer(x), torch.nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()))
    assert begun == [("pool",)]
    assert CUDAGraph.capture_begin is own
