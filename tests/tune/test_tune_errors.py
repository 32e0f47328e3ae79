"""What tune() refuses, and what it says."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn

import hmp
from hmp.tune import identity
from hmp.tune.identity import key_of
from tune_kit import perceptron, sgd, squared


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 3}, "tune() takes a torch.nn.Module; int is none"),
        ({"batches": []}, "batches is empty; give at least one batch"),
        ({"batches": 3}, "batches is an object of type int; give an iterable, such as a list or a DataLoader"),
        ({"loss": 3}, "loss= takes a function, not an object of type int"),
        (
            {"loss": lambda model, x: model(x)},
            "loss(model, batch) returned a tensor of shape (32, 8); return a scalar tensor, such as its .mean()",
        ),
        ({"tolerance": -1}, "tolerance=-1 is no tolerance; give a number from 0 on, or a mapping with"),
        ({"tolerance": {"los": 1}}, "tolerance has 'los'; give 'loss' (relative, 0.01 is one per cent)"),
        (
            {"tolerance": {"metric": 0.1}},
            "tolerance has a bound for the metric, and there is no metric; give metric=, a function of the model",
        ),
        ({"tolerance": {"gradient": 2}}, "gradient=2.0 is no cosine to ask for; give a number such as 0.99"),
        ({"budget": "ten"}, "budget='ten' is no budget; give seconds, or a text such as '10 min', '2 h' or '30 evaluations'"),
        ({"budget": "3 weeks"}, "budget='3 weeks' has the unit 'weeks'; give seconds, or a text such as"),
        ({"budget": 0}, "budget=0 is no budget; give seconds, or a text such as"),
        (
            {"objective": "joy"},
            'objective=\'joy\' is unknown; give "time" (of a step), "memory" (kept for backward) or "bytes" (kept, with packing)',
        ),
        ({"ops": []}, "ops=[] is no list of op names; give one, such as ops=['softmax', 'linear'], or None for all"),
        ({"ops": ["liner"]}, "'liner' is no torch op"),
        ({"steps": 0}, "steps=0 is no number of training steps; give 1 or more"),
        ({"start": "nowhere"}, "'nowhere' is no policy"),
        ({"optimizer": lambda model: None}, "optimizer(model) returned an object of type NoneType; return a torch.optim.Optimizer"),
        (
            {"optimizer": torch.optim.SGD},
            "optimizer= is called with the model, and SGD cannot be ('Perceptron' object is not iterable); "
            "give a function: lambda model: SGD(model.parameters(), ...)",
        ),
        (
            {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)},
            "give a function: lambda model: SGD(model.parameters(), ...)",
        ),
        (
            {"metric": lambda model: "x"},
            "metric(model) returned an object of type str; return a number, the larger the better, such as an accuracy",
        ),
        ({"metric": lambda model: None}, "metric(model) returned an object of type NoneType; return a number"),
        ({"model": nn.LazyLinear(8)}, "call it once"),
        ({"loss": torch.no_grad()(squared)}, "has no gradient"),
        ({"loss": lambda m, x: m(x).sum() * float("nan")}, "in float32 the loss is not finite: there is nothing to keep to"),
        ({"loss": lambda m, x: (m(x) * 0).sum().sqrt()}, "in float32 the gradient is not finite: there is nothing to keep to"),
        (
            {"model": nn.Linear(16, 8).requires_grad_(False), "optimizer": None},
            'there is nothing to make small; give objective="time"',
        ),
        ({"start": hmp.Policy("mine", bf16={"softmax @ norm"})}, "has scoped lines, which tune() would write anew"),
        ({"start": "saved8", "objective": "bytes"}, "policy 'saved8' has a saved list, which tune() would write anew; give one without it"),
        *(
            ({"levels": levels}, 'cannot be searched; give ("bf16", "fp32") or ("fp8", "bf16", "fp32")')
            for levels in ("fp8", ("fp8",), ("fp8", "fp32"), ("fp4", "bf16", "fp32"), ())
        ),
        (
            {"start": hmp.Policy("mine", fp8={"linear"}), "levels": ("fp8", "bf16", "fp32")},
            "policy 'mine' has an FP8 list, which tune() would write anew; give one without it as start=, such as \"autocast\"",
        ),
        ({"start": "fp8", "levels": ("bf16", "fp32")}, '"autocast", and levels=("fp8", "bf16", "fp32")'),
    ],
)
def test_what_cannot_be_searched_is_refused(changes: dict, message: str) -> None:
    model, batches = perceptron()
    given = {"model": model, "batches": batches, "loss": squared, "optimizer": sgd, "objective": "memory", "steps": 3, **changes}
    with pytest.raises(hmp.HmpError, match=re.escape(message)):
        hmp.tune(given.pop("model"), given.pop("batches"), **given)
    assert not hmp.is_converted()


def test_a_model_with_a_policy_of_its_own_is_refused() -> None:
    model, batches = perceptron()
    hmp.apply(model, "bert")
    with pytest.raises(hmp.HmpError, match=r"policy .bert. is applied to the model, whose calls follow it; call hmp\.remove"):
        hmp.tune(model, batches, loss=squared)
    hmp.revert()


def test_an_op_that_raises_in_the_low_dtype_is_a_trial_that_failed() -> None:
    torch.manual_seed(0)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        if y.dtype is not torch.float32:
            raise ValueError("only float32 here")
        return y.square().mean()

    result = hmp.tune(torch.nn.Linear(4, 4), [torch.ones(2, 4)], loss=loss, optimizer=sgd, steps=3, objective="memory")
    start = result[hmp.Policy.load("autocast").name]
    assert not start.fits
    assert start.why == "ValueError: only float32 here"
    assert "linear" in result.policy.fp32


@pytest.mark.slow
def test_other_data_another_loss_or_tolerance_is_another_search_and_so_is_what_is_no_journal(tmp_path) -> None:
    model, batches = perceptron()
    arguments = {"optimizer": sgd, "steps": 3, "objective": "memory", "folder": tmp_path, "budget": "3 evaluations"}
    hmp.tune(model, batches, loss=squared, **arguments)
    with pytest.raises(hmp.HmpError, match=r"is of a search with another data; "):
        hmp.tune(model, [2 * x for x in batches], loss=squared, **arguments)
    with pytest.raises(hmp.HmpError, match=r"is of a search with another loss; "):
        hmp.tune(model, batches, loss=lambda m, x: squared(m, x) * 2, **arguments)
    hmp.tune(model, batches, loss=lambda m, x: squared(m, x) * 2, **{**arguments, "folder": tmp_path / "twice"})
    with pytest.raises(hmp.HmpError, match=r"is of a search with another loss; "):
        hmp.tune(model, batches, loss=lambda m, x: squared(m, x) * 3, **{**arguments, "folder": tmp_path / "twice"})
    hmp.tune(model, [x.clone() for x in batches], loss=squared, **arguments)
    bounds = r"loss within 1\.00% of float32's there, loss within 50\.00% of float32's here"
    with pytest.raises(hmp.HmpError, match=rf"tune\.json: is of a search with another tolerance \({bounds}\); name another folder"):
        hmp.tune(model, batches, loss=squared, **arguments, tolerance=0.5)
    hmp.tune(model, batches, loss=squared, **arguments, tolerance=0.5, resume=False)
    (tmp_path / "tune.json").write_text("[]")
    with pytest.raises(hmp.HmpError, match=r"tune\.json: is no tune.json of hmp"):
        hmp.tune(model, batches, loss=squared, **arguments)


RATE = 0.1


def _paced(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_rate())


def _rate() -> float:
    return RATE


def _at(rate: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


class _Scaled(nn.Linear):
    """A part whose settings and state can differ though its weights are the same."""

    def __init__(self, scale: float) -> None:
        super().__init__(8, 8)
        self.scale, self.drop = scale, nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x)) * self.scale + self.shift


def _same(module: nn.Module) -> None:
    pass


@pytest.mark.parametrize(
    ("rate", "change", "is_same"),
    [
        (0.1, _same, True),
        (0.2, _same, False),
        (0.1, lambda m: m.eval(), False),
        (0.1, lambda m: m.shift.fill_(1.0), False),
        (0.1, lambda m: setattr(m, "scale", 2.0), False),
        (0.1, lambda m: setattr(m.drop, "p", 0.5), False),
        (0.1, lambda m: setattr(m, "drop", nn.Identity()), False),
        (0.1, lambda m: m.bias.requires_grad_(False), False),
    ],
    ids=["the same", "rate", "eval", "buffer", "setting", "a part's setting", "another part", "frozen"],
)
@pytest.mark.parametrize("how", ["closure", "default", "global", "partial"])
def test_a_search_is_told_from_another_by_what_its_functions_read_and_its_model_holds(
    rate: float, change, is_same: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(rate: float, change) -> str:
        torch.manual_seed(0)
        model = _Scaled(1.0)
        change(model)
        monkeypatch.setitem(globals(), "RATE", rate)
        optimizer = {
            "closure": lambda m: _at(rate, m),
            "default": lambda m, lr=rate: _at(lr, m),
            "global": _paced,
            "partial": functools.partial(_at, rate),
        }[how]
        return key_of(identity.of_model(model), identity.of_function(optimizer))

    assert (key(rate, change) == key(0.1, _same)) is is_same


def test_what_a_function_counts_and_names_of_attributes_are_no_other_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return squared(model, x)

    before = identity.of_function(loss)
    loss(*(each if at == 0 else each[0] for at, each in enumerate(perceptron())))
    assert calls == 1 and identity.of_function(loss) == before
    monkeypatch.setitem(globals(), "drop", 3)  # forward() reads self.drop
    reads = identity.of_function(_Scaled.forward)
    monkeypatch.setitem(globals(), "drop", 4)
    assert identity.of_function(_Scaled.forward) == reads
