"""Captures of programs as they are: wrapped models, scripts, threads; nothing changes that the program computes, draws or keeps."""

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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hmp
from thread_kit import in_threads


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))


NAMES = ["0", "1.0", "1.1", "1", "2", "", "(inputs)"]


def modules(path: Path) -> list[str]:
    return [call.module for call in hmp.types.Capture.load(path).calls]


def test_what_is_wrapped_around_a_model_is_no_part_of_its_names(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    inner = net()
    inner[1] = checkpoint_wrapper(inner[1])
    for model in (nn.DataParallel(inner), nn.parallel.DistributedDataParallel(inner)):
        with hmp.capture(tmp_path / "a", model):
            model(torch.randn(3, 4)).sum().backward()
        assert modules(tmp_path / "a") == NAMES
        with hmp.capture(tmp_path / "a", calls=1):  # a script's own
            model(torch.randn(3, 4))
        assert modules(tmp_path / "a") == NAMES


def test_without_a_model_every_outermost_module_is_one(tmp_path: Path) -> None:
    """The first with parameters has no prefix, others that of their class; each is captured as often as is asked for."""
    first, second, third, loss = net(), net(), net(), nn.MSELoss()
    with hmp.capture(tmp_path / "a", calls=1) as found:
        for _ in range(2):
            for model in (first, second, third):
                loss(model(torch.randn(3, 4)), torch.zeros(3, 2))
    others = ["Sequential", "Sequential2"]
    wanted = [*NAMES, "MSELoss", "MSELoss(inputs)"]
    for name in others:
        wanted += [f"{name}.{each}" for each in NAMES[:-2]] + [name, f"{name}(inputs)"]
    assert sorted(modules(tmp_path / "a")) == sorted(wanted)
    assert {call.root for call in found.calls} == {"", "MSELoss", *others}


def test_what_is_called_outermost_has_inputs_whatever_holds_it(tmp_path: Path) -> None:
    """A LightningModule's own forward need not run; and a call that failed leaves nothing running."""
    holder = nn.Module()
    holder.model, holder.metric = net(), nn.Identity()
    with hmp.capture(tmp_path / "a", holder) as found:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            holder.model(torch.randn(3, 5))
        holder.metric(holder.model(torch.randn(3, 4)))
    names = ["model.0", "model.1.0", "model.1.1", "model.1", "model.2", "model", "(inputs)", "metric", "(inputs)"]
    assert [(call.module, call.step) for call in found.calls] == list(zip(names, [0] * 7 + [1] * 2, strict=True))


def test_a_model_compiled_in_place_is_refused_with_the_remedy(tmp_path: Path, fresh_compiler: None) -> None:
    model, x = nn.Sequential(net()), torch.randn(3, 4)
    model[0].compile(backend="eager")
    with pytest.raises(hmp.HmpError, match=r'torch\.compiler\.set_stance\("force_eager"\)'), hmp.capture(tmp_path / "a"):
        model[0](x)
    with torch.compiler.set_stance("force_eager"), hmp.capture(tmp_path / "a"):
        model[0](x)
    assert modules(tmp_path / "a") == NAMES


def test_another_look_at_the_ops_sees_none_of_the_captures_own(tmp_path: Path) -> None:
    model, x, lists = net(), torch.randn(3, 4), hmp.Policy(bf16={"linear"})

    def looked_at() -> tuple[int, list[Any]]:
        with hmp.casts(lists), FlopCounterMode(display=False) as counter, hmp.record() as report, hmp.detect_nonfinite():
            model(x)
        return counter.get_total_flops(), [(row.op, row.module, row.dtypes, row.calls, row.casts) for row in report.rows]

    wanted = looked_at()
    with hmp.capture(tmp_path / "a", model):
        assert looked_at() == wanted
    assert modules(tmp_path / "a") == NAMES


def test_threads_write_one_capture_and_captures_nest(tmp_path: Path) -> None:
    model = net()
    with hmp.capture(tmp_path / "a", model), hmp.capture(tmp_path / "b", model[1]):
        in_threads(model, [torch.randn(3, 4) for _ in range(4)])
    assert sorted(modules(tmp_path / "a")) == sorted(4 * NAMES)
    assert sorted(modules(tmp_path / "b")) == sorted(4 * ["0", "1", "", "(inputs)"])
    numbers = [call.number for call in hmp.types.Capture.load(tmp_path / "a").calls if call.module == "1.0"]
    assert numbers == [0, 1, 2, 3]


def test_a_model_that_calls_itself_is_one_call(tmp_path: Path) -> None:
    class Again(nn.Sequential):
        def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
            return self[0](self(x, times - 1) if times else x)

    model = Again(nn.Linear(4, 4))
    with hmp.capture(tmp_path / "a", model, calls=1) as found:
        model(torch.randn(3, 4))
    assert modules(tmp_path / "a") == ["0", "", "0", "", "(inputs)"]
    torch.testing.assert_close(found.values(3, 0), model[0](found.values(1, 0)).detach())


def test_the_rank_is_that_of_the_script_which_joins_and_leaves_the_others_in_the_region(tmp_path: Path) -> None:
    model = net()
    with hmp.capture(tmp_path / "a.capture") as found:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        try:
            model(torch.randn(3, 4))
        finally:
            torch.distributed.destroy_process_group()
    assert found.path == tmp_path / "a.rank1.capture" and [each.name for each in tmp_path.iterdir()] == [found.path.name]


def test_a_module_that_answers_to_every_name_is_no_wrapper(tmp_path: Path) -> None:
    class Forwards(nn.Module):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name in ("layer", "_modules", "_parameters") else self.layer

    model = Forwards()
    model.layer = nn.Linear(4, 4)
    model.forward = lambda x: model.layer(x)
    with hmp.capture(tmp_path / "a", model):
        model(torch.randn(3, 4))
    assert modules(tmp_path / "a") == ["layer", "", "(inputs)"]


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
