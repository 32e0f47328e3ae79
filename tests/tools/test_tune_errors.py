"""What tune() refuses, and what it says."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import hmp
from compile_kit import BRIDGED
from tune_kit import perceptron, sgd, squared

LINEAR = hmp.Policy("products", bf16={"linear"})
SCOPED = hmp.Policy("mine", bf16={"softmax @ norm"})
FP8 = hmp.Policy("mine", fp8={"linear"})
# what is given otherwise, and what the error names
REFUSED = [
    ({"model": 3}, "int"),
    ({"batches": []}, "at least one batch, got none"),
    ({"batches": 3}, "such as a list or a DataLoader, got int"),
    ({"loss": 3}, "loss="),
    ({"loss": lambda model, x: model(x)}, "shape (32, 8)"),
    ({"tolerance": -1}, "tolerance=-1"),
    ({"tolerance": {"los": 1}}, "'los'"),
    ({"tolerance": {"metric": 0.1}}, "metric="),
    ({"tolerance": {"gradient": 0.9}}, "'gradient'"),
    ({"seconds": "10 min"}, "seconds='10 min'"),
    ({"seconds": 0}, "seconds=0"),
    ({"max_trials": 0.5}, "max_trials=0.5"),
    ({"progress": "bar"}, "progress='bar'"),
    ({"loss": lambda m, x: squared(m, x.add_(1.0))}, "writes into the batch's tensors"),
    ({"objective": "joy"}, "'joy'"),
    ({"ops": []}, "ops=[]"),
    ({"ops": ["liner"]}, "'liner'"),
    ({"steps": 0}, "steps=0"),
    ({"start": "nowhere"}, "'nowhere'"),
    ({"optimizer": lambda model: None}, "optimizer(model) returned an object of type NoneType"),
    ({"optimizer": torch.optim.SGD}, "lambda model: torch.optim.SGD(model.parameters())"),
    ({"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}, "lambda model: torch.optim.SGD(model.parameters())"),
    ({"metric": lambda model: "x"}, "such as an accuracy, got str"),
    ({"model": nn.LazyLinear(8)}, "call it once"),
    ({"loss": torch.no_grad()(squared)}, "to require grad"),
    ({"loss": lambda m, x: m(x).sum() * float("nan")}, "the loss is not finite"),
    ({"loss": lambda m, x: (m(x) * 0).sum().sqrt()}, "the gradient is not finite"),
    ({"model": nn.Linear(16, 8).requires_grad_(False), "optimizer": None}, 'objective="time"'),
    ({"start": SCOPED}, "entries with a scope"),
    ({"start": "saved8", "objective": "bytes"}, "kind 'saved'"),
    ({"levels": "fp8"}, "got 'fp8'"),
    ({"levels": ("fp8", "fp32")}, "got ('fp8', 'fp32')"),
    ({"start": FP8, "levels": ("fp8", "bf16", "fp32")}, "kind 'fp8'"),
    ({"start": "fp8", "levels": ("bf16", "fp32")}, "kind 'fp8'"),
]


def test_what_cannot_be_searched_is_refused() -> None:
    model, batches = perceptron()
    for changes, told in REFUSED:
        given = {"model": model, "batches": batches, "loss": squared, "optimizer": sgd, "objective": "memory", "steps": 3, **changes}
        with pytest.raises(hmp.HmpError) as caught:
            hmp.tune(given.pop("model"), given.pop("batches"), **given)
        assert told in str(caught.value), changes
        assert not hmp.is_converted()
    hmp.apply(model, "bert")
    with pytest.raises(hmp.HmpError, match=r"'bert' is applied .*hmp\.remove"):
        hmp.tune(model, batches, loss=squared)


def test_an_op_that_raises_in_the_low_dtype_is_a_trial_that_failed() -> None:
    torch.manual_seed(0)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        if y.dtype is not torch.float32:
            raise ValueError("only float32 here")
        return y.square().mean()

    result = hmp.tune(torch.nn.Linear(4, 4), [torch.ones(2, 4)], loss=loss, optimizer=sgd, steps=3, objective="memory", start=LINEAR)
    start = result[LINEAR.name]
    assert not start.fits
    assert start.why == "ValueError: only float32 here"
    assert "linear" in result.policy.fp32


@BRIDGED
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_refused() -> None:
    """Beyond torch's limit of recompilations it would run uncompiled, and the time of a step would be that of another program."""
    with pytest.raises(hmp.HmpError, match="the model is compiled; pass one that isn't"):
        hmp.tune(torch.compile(nn.Linear(16, 8), backend="eager"), perceptron()[1], loss=squared)
