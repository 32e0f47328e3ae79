"""What a capture holds is what plain hooks see, of wrapped models, scripts and threads; nothing that the program computes changes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hmp
from process_kit import to_install
from thread_kit import in_threads


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))


NAMES = ["0", "1.0", "1.1", "1", "2", "", "(inputs)"]


def modules(path: Path) -> list[str]:
    return [call.module for call in hmp.types.Capture.load(path).calls]


def test_what_is_wrapped_around_a_model_is_no_part_of_its_names(tmp_path: Path, process_group: None) -> None:
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


@dataclasses.dataclass
class Answer:
    scores: torch.Tensor
    extra: dict[str, torch.Tensor]


class Twice(nn.Module):
    """A model whose layer is called twice, and whose parts return a tuple, a dict and a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pair, self.head = nn.Linear(6, 6), Pair(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Answer:
        left, right = self.pair(self.layer(torch.tanh(self.layer(x))))
        return Answer(self.head(left + right) * scale, {"left": left, "count": torch.tensor(3)})


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.relu(), x[:, ::2].repeat(1, 2)


def test_every_call_is_there_in_order_with_its_values(tmp_path: Path) -> None:
    model, x, scale = Twice(), torch.randn(4, 6), torch.tensor(2.0, dtype=torch.float64)
    wanted: list[tuple[str, list[torch.Tensor]]] = []  # each module's results, in order, as torch's own hooks on the modules give them

    def note(name: str, result: object) -> None:
        found = [result.scores, *result.extra.values()] if isinstance(result, Answer) else result
        wanted.append((name, [each.detach().clone() for each in ([found] if isinstance(found, torch.Tensor) else found)]))

    hooks = [module.register_forward_hook(lambda _, __, out, name=name: note(name, out)) for name, module in model.named_modules()]
    model(x, scale)
    for hook in hooks:
        hook.remove()
    with hmp.capture(tmp_path / "a.capture", model):
        model(x, scale=scale)
    found = hmp.types.Capture.load(tmp_path / "a.capture")
    calls = [call for call in found.calls if call.module != "(inputs)"]
    assert [call.module for call in calls] == [name for name, _ in wanted] == ["layer", "layer", "pair", "head", ""]
    assert [call.number for call in calls] == [0, 1, 0, 0, 0]
    assert [[output.path for output in call.outputs] for call in calls[2:]] == [["0", "1"], [""], ["scores", "extra.left", "extra.count"]]
    for at, (call, (_, tensors)) in enumerate(zip(calls, wanted, strict=True)):
        for number, (output, tensor) in enumerate(zip(call.outputs, tensors, strict=True)):
            assert torch.equal(found.values(at, number), tensor)
            assert (output.shape, f"torch.{output.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
    (inputs,) = [call for call in found.calls if call.module == "(inputs)"]
    assert [output.path for output in inputs.outputs] == ["x", "scale"]
    assert (calls[0].inputs, calls[0].weights, calls[-1].inputs) == (("float32",), ("float32",), ("float32", "float64"))


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        odd = x.clone()
        odd[0, :2] = torch.tensor([float("nan"), float("inf")])
        return [odd, x.to(torch.float8_e4m3fn), torch.complex(x, -x).conj(), x > 0, x[:0], x.to_sparse(), x.to("meta")]


def test_what_few_ops_know_is_kept_too_or_said_not_to_be(tmp_path: Path) -> None:
    model, x = Odd(), torch.randn(3, 4)
    with hmp.capture(tmp_path / "a.capture", model) as found:
        _, fp8, *_ = model(x)
    outputs = found.calls[0].outputs
    assert torch.equal(found.values(0, 1), fp8.float()) and outputs[1].dtype == "float8_e4m3fn"
    assert torch.equal(found.values(0, 2), torch.stack([x, x], -1).flatten(-2)) and outputs[2].shape == (3, 4)
    assert torch.equal(found.values(0, 3), x > 0) and found.values(0, 4).shape == (0, 4)
    assert [output.bits for output in outputs[5:]] == ["", ""]
    assert "the values of 2 outputs can't be read" in found.notes[0]


def captured(path: Path) -> Path:
    model = nn.Linear(4, 4)
    with hmp.capture(path, model):
        model(torch.randn(2, 4))
    return path


def test_a_file_that_is_cut_off_or_no_capture_or_of_another_form_is_refused_by_its_path(tmp_path: Path) -> None:
    whole = captured(tmp_path / "a.capture").read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        (cut := tmp_path / "cut.capture").write_bytes(whole[:length])
        with pytest.raises(hmp.HmpError, match=r"cut\.capture: expected a capture, got another or a truncated file"):
            hmp.types.Capture.load(cut)
    save_file({"a": torch.ones(1)}, other := tmp_path / "weights.safetensors")
    for path, told in ((tmp_path / "none.capture", "no such file"), (other, "got another safetensors file"), (tmp_path, "got a folder")):
        with pytest.raises(hmp.HmpError, match=f"{path.name}.* {told}"):
            hmp.types.Capture.load(path)
    save_file({}, other, metadata={"hmp_capture": "5", "about": json.dumps({"hmp": "9.1"})})
    with pytest.raises(hmp.HmpError, match="got format 5, of another hmp"):
        hmp.types.Capture.load(other)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_cannot_be_captured_is_told_before_the_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = nn.Linear(4, 4), tmp_path / "a"
    refused = [
        (tmp_path / "none" / "a.capture", model, {}, "No such file"),
        (tmp_path, model, {}, "got a folder"),
        (file, 3, {}, "got int"),
        (file, torch.jit.script(model), {}, "pass the module that it was scripted from"),
        (file, model, {"calls": 0}, "got 0"),
    ]
    if Path("/proc").exists():  # whoever runs the test
        refused += [("/proc/a", model, {}, "/proc/a: can't write")]
    for path, given, options, said in refused:
        with pytest.raises(hmp.HmpError, match=said), hmp.capture(path, given, **options):
            pytest.fail("the region began")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="safetensors, numpy") as error, hmp.capture(file, model):
        pytest.fail("the region began")
    assert to_install("capture") in str(error.value)


def test_a_region_without_a_call_is_an_error_and_one_that_fails_leaves_what_it_saw(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3))
    with pytest.raises(hmp.HmpError, match="a was not written: no module of Sequential was called"):
        with hmp.capture(tmp_path / "a", model):
            model[0].forward(torch.randn(2, 4))  # not a call of the module
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), hmp.capture(tmp_path / "a", model) as found:
        model(torch.randn(2, 4))
    assert [call.module for call in found.calls] == ["0"]
    assert [each.name for each in tmp_path.iterdir()] == ["a"], "no half of a file"


def test_the_form_is_told_by_the_file_alone(tmp_path: Path) -> None:
    """A change of what is written needs another number: this file was made by hand in form 4."""
    call = {"module": "", "kind": "Linear", "root": "", "step": 0, "number": 0, "is_leaf": True, "inputs": ["float32"], "weights": []}
    output = {"path": "", "shape": [2], "dtype": "float32", "bits": "ab"}
    calls = [{**call, "policy": "", "outputs": [{**output, "is_whole": True}]}]
    metadata = {"hmp_capture": "4", "about": json.dumps({"model": "Linear"}), "notes": "[]", "calls": json.dumps(calls)}
    save_file({"0.0": torch.tensor([3.0, 4.0])}, tmp_path / "a", metadata=metadata)
    found = hmp.types.Capture.load(tmp_path / "a")
    assert found.values(0, 0).tolist() == [3.0, 4.0] and found.calls[0].outputs[0].bits == "ab"
    assert found.about == {"model": "Linear"}
    with hmp.capture(tmp_path / "b", model := nn.Linear(2, 2)):
        model(torch.ones(1, 2))
    with safe_open(tmp_path / "b", "pt") as written:
        assert written.metadata()["hmp_capture"] == "4"


def test_a_region_in_progress_does_not_read_an_earlier_file(tmp_path: Path) -> None:
    captured(path := tmp_path / "a.capture")
    with hmp.capture(path, model := nn.Linear(3, 3)) as found:
        model(torch.randn(5, 3))
        with pytest.raises(hmp.HmpError, match=r"a\.capture is written when .* ends; read it after"):
            _ = found.calls
    assert found.calls[0].outputs[0].shape == (5, 3)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="files that cannot be written or read, whoever runs the test")
def test_a_file_that_can_no_more_be_written_or_read_is_told_by_its_path(tmp_path: Path) -> None:
    (folder := tmp_path / "gone").mkdir()
    model = nn.Linear(3, 3)
    model.register_forward_hook(lambda *_: folder.rmdir())
    with pytest.raises(hmp.HmpError, match="gone/a was not written"):
        with hmp.capture(folder / "a", model):
            model(torch.randn(2, 3))
    with pytest.raises(hmp.HmpError, match=r"/proc/self/mem: expected a capture, got another or a truncated file"):
        hmp.types.Capture.load("/proc/self/mem")


def test_what_holds_itself_is_gone_through_once(tmp_path: Path) -> None:
    class Holds(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            found: dict[str, object] = {"x": x, "twice": [x, x]}
            return found | {"parts": [found], "itself": found.setdefault("inside", found)}

    with hmp.capture(tmp_path / "a", model := Holds()) as found:
        model(torch.randn(2, 3))
    assert [each.path for each in found.calls[0].outputs][:3] == ["x", "twice.0", "twice.1"]


def test_a_module_with_hooks_is_named_since_they_may_return_something_else(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, out: out * 100)
    with hmp.capture(tmp_path / "a", model) as found:
        model(torch.randn(2, 3))
    assert "1 module with forward hooks" in found.notes[0] and found.notes[0].endswith(": 0")
