"""What a capture holds is what plain forward hooks see; a file that cannot be read says which and why."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import hmp
from process_kit import to_install


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


def seen_by_hooks(model: nn.Module, *args: torch.Tensor) -> list[tuple[str, list[torch.Tensor]]]:
    """Each module's results, in order, as torch's own hooks on the modules give them."""
    seen: list[tuple[str, list[torch.Tensor]]] = []

    def note(name: str, result: object) -> None:
        found = [result.scores, *result.extra.values()] if isinstance(result, Answer) else result
        seen.append((name, [each.detach().clone() for each in ([found] if isinstance(found, torch.Tensor) else found)]))

    hooks = [module.register_forward_hook(lambda _, __, out, name=name: note(name, out)) for name, module in model.named_modules()]
    model(*args)
    for hook in hooks:
        hook.remove()
    return seen


def test_every_call_is_there_in_order_with_its_values(tmp_path: Path) -> None:
    model, x, scale = Twice(), torch.randn(4, 6), torch.tensor(2.0, dtype=torch.float64)
    wanted = seen_by_hooks(model, x, scale)
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
