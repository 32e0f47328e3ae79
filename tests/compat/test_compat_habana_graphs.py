"""Habana's graphs: functions that capture a model give it back, and an HPUGraph is CUDA's, or an error where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hmp
from hmp.compat.habana import device_map


@pytest.mark.usefixtures("hpu_on_cpu")
def test_models_that_are_captured_run_as_they_are() -> None:
    import habana_frameworks.torch as ht

    model = torch.nn.Linear(4, 2)
    assert ht.hpu.wrap_in_hpu_graph(model, disable_tensor_cache=True) is model
    assert ht.hpu.graphs.make_graphed_callables(model, (torch.ones(1, 4),)) is model
    assert ht.hpu.ModuleCacher(max_graphs=10)(model=model, inplace=True) is model


@pytest.mark.usefixtures("hpu_on_cpu")
def test_a_graph_without_cuda_is_an_error() -> None:
    import habana_frameworks.torch.hpu as hpu

    with pytest.raises(hmp.HmpError, match='expected "hpu" to be mapped to CUDA, got cpu, which has no graphs; run the step itself'):
        hpu.HPUGraph()


class FakeGraph:
    """CUDA's, which runs nothing while it captures: the steps that it has run."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.said.append(name)


@pytest.mark.usefixtures("hpu_on_cpu")
def test_a_captured_step_has_run_once_as_on_a_gaudi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_map, "_target", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    for dry_run, said in ((False, ["capture_begin", "capture_end", "replay"]), (True, ["capture_begin", "capture_end"])):
        graph = torch.hpu.HPUGraph()
        graph.capture_begin(dry_run=dry_run)
        graph.capture_end()
        assert graph.of_torch.said == said
