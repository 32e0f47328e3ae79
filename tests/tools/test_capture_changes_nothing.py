"""Results, gradients, random numbers, hooks and graphs are what they are without a capture, in whatever region the model runs."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmp

POLICY = hmp.Policy("mine", bf16={"linear"}, fp32={"softmax", "layer_norm"})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.attention(x))).softmax(-1)


REGIONS: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "mine": lambda: hmp.casts(POLICY),
}


def results(model: nn.Module, region: Callable[[], Any]) -> list[torch.Tensor]:
    """The output, the gradients, and a random number that is drawn after them."""
    torch.manual_seed(1)
    with region():
        out = model(torch.randn(3, 5, 16))
        loss = out.square().mean()
    if loss.requires_grad:
        loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [out, *grads, torch.randn(3)]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", REGIONS)
def test_no_bit_changes(name: str, is_training: bool, tmp_path: Path) -> None:
    """Not in eval mode either, where torch.nn.TransformerEncoderLayer takes its fused path if no module of it has a hook."""
    model = Net().train(is_training)
    wanted = results(model, REGIONS[name])
    with hmp.capture(tmp_path / "a", model) as found:
        got = results(model, REGIONS[name])
    assert len(got) == len(wanted) and all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    policies = {call.policy for call in found.calls}
    said = {"autocast": {"torch.autocast bfloat16"}, "mine": {"mine"}}
    assert policies == said.get(name, {""})
    is_fused = not is_training and name in ("no_grad", "inference_mode")
    assert ("attention.linear1" not in {call.module for call in found.calls}) is is_fused
    assert any("fused kernel" in note and "attention.linear1" in note for note in found.notes) is is_fused


def test_an_applied_policy_is_noted_for_the_whole_model(tmp_path: Path) -> None:
    model = hmp.apply(Net(), POLICY)
    with hmp.capture(tmp_path / "a", model) as found:
        model(torch.randn(3, 5, 16))
    assert {call.policy for call in found.calls} == {"mine"}
    assert {call.outputs[0].dtype for call in found.calls if call.module == "head"} == {"bfloat16"}


def test_no_hook_and_no_graph_is_left_by_an_exception_either(tmp_path: Path) -> None:
    model, module = nn.Sequential(nn.Linear(16, 16)), nn.modules.module
    before = {name: len(value) for name, value in vars(module).items() if name.startswith("_global_") and hasattr(value, "__len__")}

    class Token: ...

    token = Token()
    alive = weakref.ref(token)
    try:
        with hmp.capture(tmp_path / "a", model):
            out = model(torch.randn(2, 5, 16))
            out.register_hook(lambda grad, held=token: grad)  # the graph holds it
            del out, token
            gc.collect()
            assert alive() is None, "the capture holds the graph of what it has seen"
            raise ValueError("mine")
    except ValueError:
        pass
    assert before == {name: len(getattr(module, name)) for name in before}
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_a_recomputed_checkpoint_is_one_call(tmp_path: Path) -> None:
    class Recomputed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self[0], x, use_reentrant=False)

    model = Recomputed(nn.Linear(4, 4))
    with hmp.capture(tmp_path / "a", model) as found:
        model(torch.randn(2, 4)).sum().backward()
    assert [call.module for call in found.calls] == ["0", "", "(inputs)"]


def test_under_a_transform_shapes_are_noted_and_results_are_right(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 5, 4)
    with hmp.capture(tmp_path / "a", model) as found:
        out = torch.func.vmap(model)(x)
    assert torch.equal(out, torch.func.vmap(model)(x))
    assert [(output.shape, output.bits) for output in found.calls[0].outputs] == [((5, 2), "")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wrapped", "function"])
def test_compiled_code_runs_compiled_and_what_comes_out_is_seen(kind: str, tmp_path: Path, fresh_compiler: None) -> None:
    class Sine(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self[0](x))

    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, x = Sine(nn.Linear(4, 8)), torch.randn(3, 4)
    wanted = model(x)
    called = torch.compile(model if kind == "wrapped" else lambda x: model(x), backend=backend)
    called(x)
    before = len(graphs)
    assert before == 1
    with contextlib.nullcontext() if kind != "function" else pytest.raises(hmp.HmpError, match="was not written: no module"):
        with hmp.capture(tmp_path / "a", called if kind == "wrapped" else model):
            assert torch.equal(called(x), wanted)
    assert len(graphs) == before, "it was not compiled anew"
    if kind != "function":
        found = hmp.types.Capture.load(tmp_path / "a")
        assert [call.module for call in found.calls] == ["", "(inputs)"]
        assert torch.equal(found.values(0, 0), wanted)
        assert any("compile" in note for note in found.notes)
