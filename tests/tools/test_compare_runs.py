"""hmp.compare() on whole models: it decides as hmp does without it, leaves no trace, repeats itself, and holds few tensors."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from trap_kit import policy

LOW = policy(bf16={"linear", "dropout"}, fp32={"softmax"}, name="low")


class Fn(nn.Module):
    """A module of given layers whose forward is a function of it and the inputs."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


def net(*, dropout: float = 0.5) -> nn.Sequential:
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)]
    return nn.Sequential(*layers, nn.Softmax(-1))


def squares(output: torch.Tensor) -> torch.Tensor:
    return (output.float() ** 2).sum()


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def test_dropout_is_the_same_in_all_runs_and_the_next_time():
    model, x = net(), torch.randn(6, 8)
    first, again = (hmp.compare(model, x, LOW, loss=squares) for _ in range(2))
    assert first.to_dict() | {"date": ""} == again.to_dict() | {"date": ""}
    assert first.output < 0.02  # with other masks it would be around one
    dropped = [r for r in first.rows if r.op == "dropout"]
    assert dropped and all(r.accumulated < 0.02 for r in dropped)


def test_what_is_drawn_in_low_precision_is_drawn_once():
    def noisy(self: Any, x: torch.Tensor) -> torch.Tensor:
        low = x.bfloat16()
        noise = torch.randn_like(low) + torch.empty_like(low).uniform_()
        return (low + noise) * torch.bernoulli(torch.full_like(low, 0.5))

    assert hmp.compare(Fn(noisy), torch.randn(64), policy()).output < 0.01


def test_an_exception_in_the_model_is_its_own_and_leaves_it_as_before():
    def raises(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(self.norm(x)))
        if y.dtype is torch.bfloat16:
            raise KeyError("label")
        return y

    model = Fn(raises, norm=nn.BatchNorm1d(4), layer=nn.Linear(4, 4))
    weight = model.layer.weight.clone()
    with pytest.raises(KeyError, match="label") as caught:
        hmp.compare(model, torch.randn(2, 4), policy(bf16={"linear"}))
    assert caught.value.args == ("label",)
    assert torch.equal(model.layer.weight, weight) and model.layer.weight.grad is None
    assert float(model.norm.running_mean.abs().sum()) == 0.0 and int(model.norm.num_batches_tracked) == 0
    assert not hmp.casts_enabled()


@pytest.mark.slow
def test_nothing_stays_in_memory():
    def tensors() -> list[torch.Tensor]:
        gc.collect()
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    model, x = net(), torch.randn(6, 8)
    hmp.compare(model, x, LOW, loss=squares)
    before = tensors()  # kept, so that no later tensor gets the id of one of them
    ids = set(map(id, before))
    assert hmp.compare(model, x, LOW, loss=squares).rows
    assert not [tensor.shape for tensor in tensors() if id(tensor) not in ids]


def test_an_in_place_write_through_a_view_reaches_the_reference():
    def writes(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 4)
        out[0] = (x * 3).bfloat16()
        out[1].copy_(x).mul_(2)
        return out * 1

    x = torch.randn(4)
    exact = torch.stack((x * 3, x * 2))
    got = torch.stack(((x * 3).bfloat16().float(), x * 2))
    assert hmp.compare(Fn(writes), x, policy()).output == pytest.approx(distance(got, exact), rel=1e-4)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_whose_kernels_keep_notes_for_backward(kind: str):
    layer = getattr(nn, kind)(4, 8, num_layers=2, dropout=0.3)
    model, x, lists = Fn(lambda self, x: self.layer(x)[0], layer=layer), torch.randn(5, 3, 4), policy(bf16={kind.lower()})
    torch.manual_seed(1)
    with hmp.casts(lists):
        loss = squares(model(x)).item()
    torch.manual_seed(1)
    comparison = hmp.compare(model, x, lists, loss=squares)
    assert comparison.loss_value == loss
    assert 0 < comparison.output < 0.02 and 0 < comparison.gradient < 0.02
    assert comparison.advice[0].named == f"{kind.lower()} @ layer" and comparison.advice[0].output == 0.0


def test_a_loss_is_given_or_the_outputs_own_or_none_and_a_mapping_is_keywords(tmp_path: Any):
    forward = hmp.compare(net(), (torch.randn(6, 8),), LOW)
    assert forward.loss is forward.gradient is None and {r.direction for r in forward.rows} == {"forward"}

    def with_loss(self: Any, *, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    comparison = hmp.compare(Fn(with_loss, layer=nn.Linear(4, 2)), {"inputs": torch.randn(3, 4), "labels": torch.tensor([0, 1, 1])}, LOW)
    assert {r.op for r in comparison.rows if r.direction == "backward"} >= {"linear", "cross_entropy"}
    assert {r.module for r in comparison.rows} >= {"layer", "Fn"}
    read = json.loads(comparison.to_json(tmp_path / "it.json").read_text())
    assert read["policy"] == "low" and len(read["rows"]) == len(comparison.rows)
    assert read["trials"]["alone"][0]["moves"] == [["linear @ layer", "fp32"]]
    assert {"op", "aten", "direction", "module", "dtype", "isolated", "accumulated"} <= set(read["rows"][0])


DETACHED = Fn(lambda self, x: self.layer(x).detach(), layer=nn.Linear(8, 4))
X = torch.ones(6, 8)


def test_wrong_use_is_an_error_that_says_what_is_wrong():
    for call, told in (
        (lambda: hmp.compare(net(), X, LOW, loss=lambda out: out), "float32[6, 4]"),
        (lambda: hmp.compare(net(), X, LOW, loss=lambda out: 1.0), "float"),
        (lambda: hmp.compare(nn.ReLU(), X, LOW, loss=torch.sum), "no weight of the model does"),
        (lambda: hmp.compare(net(), X, LOW, loss=lambda out: out.detach().sum()), "in loss(output) detaches it"),
        (lambda: hmp.compare(DETACHED, X, LOW, loss=torch.sum), "the loss does not depend on them"),
        (lambda: hmp.compare(net(), X, LOW, loss=3), "int"),
        (lambda: hmp.compare(net(), X, LOW, loss=lambda out: hmp.compare(net(), X, LOW).loss), "inside compare()"),
    ):
        with pytest.raises(hmp.HmpError) as caught:
            call()
        assert told in str(caught.value)
    with torch.no_grad():  # as one without a gradient is told to do
        comparison = hmp.compare(DETACHED, X, LOW, loss=lambda out: out.detach().sum())
    assert comparison.output is not None and comparison.gradient is None


def test_a_checkpointed_models_recomputation_is_compared_as_forward():
    model = Fn(lambda self, x: torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False), inner=nn.Linear(4, 4))
    comparison = hmp.compare(model, torch.randn(2, 4), LOW, loss=lambda out: out.sum())
    of_linear = [(r.aten, r.direction) for r in comparison.rows if r.op == "linear" for _ in range(r.calls)]
    # torch recomputes as far as backward needs it: the casts of input, weight and bias
    assert of_linear.count(("_to_copy", "forward")) == 6 and ("mm", "backward") in of_linear
    assert comparison.gradient < 0.02


def test_a_run_without_hmp_is_told_and_that_the_model_goes_another_way_in_float32():
    def by_dtype(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Picks a constant by the dtype, as many losses do."""
        y = torch.softmax(self.layer(x), -1)
        return {"loss": -(y.clamp_min(torch.finfo(y.dtype).eps)).log().min(), "y": y}

    torch.manual_seed(0)
    model, x, lists = Fn(by_dtype, layer=nn.Linear(64, 512)), 30 * torch.randn(4, 64), policy(bf16={"linear"})
    plain = model(x)["loss"].item()
    with hmp.casts(lists):
        cast = model(x)["loss"].item()
    found = hmp.compare(model, x, lists)
    assert abs(cast - plain) > 0.5 * abs(plain)
    assert found.float32_loss_value == pytest.approx(plain) and found.loss_value == pytest.approx(cast)
    assert found.loss == pytest.approx(abs(cast - plain) / abs(plain))
    assert "computes something else in float32" in str(found)
    # moved, the op takes float32's way
    assert found.advice[0].named == "linear @ layer" and found.advice[0].loss == 0.0


def test_an_error_of_the_models_says_what_was_seen_before_it() -> None:
    class Picky(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if y.dtype is torch.bfloat16:
                raise KeyError("label")
            return y

    with pytest.raises(KeyError) as caught:
        hmp.compare(Picky(4, 4), torch.randn(2, 4), "torch-cpu")
    (note,) = caught.value.__notes__
    assert note.startswith("the last ops that compare() saw under policy 'torch-cpu") and "linear in Picky (bfloat16)" in note
