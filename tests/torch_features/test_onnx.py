"""torch.onnx.export of an applied model: the file computes what plain torch with explicit casts computes, in onnxruntime too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from oracle import BF16, F16
from trap_kit import policy

onnx = pytest.importorskip("onnx", reason="torch.onnx.export needs onnx and onnxscript, of the extra test")
pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnx and onnxscript, of the extra test")
onnxruntime = pytest.importorskip("onnxruntime", reason="files are run by onnxruntime, of the extra test")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.native_kernels,
    pytest.mark.skipif(torch.__version__ < (2, 13), reason="other releases export in other ways, which nobody tried"),
]
LISTED = {"bf16": ["linear", "conv2d", "layer_norm", "linear @ head"], "fp32": ["softmax", "linear @ wide"]}
STEP = {BF16: 2**-7, F16: 2**-10}  # between neighbouring numbers near 1


class Model(torch.nn.Module):
    """Norms on and off the list after low-precision ops, a convolution that torch would fuse with its norm, a layer with a scope."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.batch, self.instance = torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.InstanceNorm2d(16, affine=True)
        self.norm, self.body = torch.nn.LayerNorm(16), torch.nn.Linear(16, 600)
        self.wide, self.head = torch.nn.Linear(600, 8), torch.nn.Linear(600, 8)
        for name, each in self.named_parameters():
            if name.partition(".")[0] in ("batch", "instance", "norm"):
                torch.nn.init.uniform_(each, 0.5, 1.5)  # which no low-precision dtype has
        self.batch.running_mean.normal_()
        self.batch.running_var.uniform_(0.5, 2)

    def forward(self, x):
        image = self.instance(self.batch(self.conv(x)))
        hidden = self.body(self.norm(image.mean((2, 3))))
        return image, torch.softmax(hidden, -1), self.wide(hidden), self.head(hidden)


def by_hand(model: Model, x: torch.Tensor, low: torch.dtype) -> tuple[torch.Tensor, ...]:
    def layer(op: Any, module: Any, value: torch.Tensor) -> torch.Tensor:
        return op(value.to(low), module.weight.to(low), module.bias.to(low))

    batch, instance, norm = model.batch, model.instance, model.norm
    image = layer(F.conv2d, model.conv, x).float()
    image = F.batch_norm(image, batch.running_mean, batch.running_var, batch.weight, batch.bias).to(low)
    image = F.instance_norm(image.float(), weight=instance.weight, bias=instance.bias).to(low)
    hidden = F.layer_norm(image.mean((2, 3)).float(), (16,), norm.weight, norm.bias).to(low)
    hidden = layer(F.linear, model.body, hidden)
    wide = F.linear(hidden.float(), model.wide.weight, model.wide.bias)
    return image, torch.softmax(hidden.float(), -1), wide, layer(F.linear, model.head, hidden)


def exported(model: Any, x: torch.Tensor, path: Path) -> Any:
    torch.onnx.export(model, (x,), str(path), dynamo=True, verbose=False, external_data=False)
    return onnx.load(path)


def dtypes(values: Any) -> list[str]:
    return [onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in values]


def assert_close(got: Any, want: tuple[torch.Tensor, ...], low: torch.dtype) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(torch.from_numpy(one.astype("float32")), other.float(), rtol=8 * STEP[low], atol=8 * STEP[low])


@pytest.mark.parametrize("scope", ["apply", "casts", "convert"])
def test_onnxruntime_computes_as_plain_torch_with_explicit_casts(scope: str, tmp_path: Path) -> None:
    model, x, lists = Model().eval(), torch.randn(2, 3, 10, 10), policy(**LISTED, dtype=F16)
    want = by_hand(model, x, F16)
    if scope == "apply":
        hmp.cast_weights(hmp.apply(model, lists))
        file = exported(model, x, tmp_path / "model.onnx")
    else:
        with hmp.casts(lists, model=model) if scope == "casts" else hmp.convert(policy=lists, model=model):
            file = exported(model, x, tmp_path / "model.onnx")
    hmp.revert()
    assert dtypes(file.graph.output) == ["FLOAT16", "FLOAT", "FLOAT", "FLOAT16"]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert_close(session.run(None, {session.get_inputs()[0].name: x.numpy()}), want, F16)
    kept = {each.name: onnx.TensorProto.DataType.Name(each.data_type) for each in file.graph.initializer}
    assert kept["body.weight"] == ("FLOAT16" if scope == "apply" else "FLOAT")  # the file is as large as the model's weights
    assert kept["norm.weight"] == kept["wide.weight"] == "FLOAT"


def test_a_file_in_bfloat16_computes_as_plain_torch_with_explicit_casts(tmp_path: Path) -> None:
    """By onnx's own implementation: onnxruntime has no kernels for it on a CPU."""
    model, x = Model().eval(), torch.randn(2, 3, 10, 10)
    want = by_hand(model, x, BF16)
    file = exported(hmp.apply(model, policy(**LISTED), outputs="float32"), x, tmp_path / "model.onnx")
    assert dtypes(file.graph.output) == ["FLOAT"] * 4
    evaluator = onnx.reference.ReferenceEvaluator(file)
    assert_close(evaluator.run(None, {evaluator.input_names[0]: x.numpy()}), want, BF16)
