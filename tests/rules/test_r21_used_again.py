"""R21: a weight that one graph uses many times is kept once for backward, and its gradients are those of a cast for each use.

Oracle: plain torch where each use casts by hand, float64 for errors, and torch.autocast for what is kept.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import autocast_kit
import hmp
from low_kernels_kit import products_as_computed
from oracle import kept_for_backward

LOW = torch.bfloat16
USES = 5
POLICY = hmp.Policy("products", bf16={"linear", "conv2d", "gru_cell"})
Grads = tuple[Tensor | None, ...]


class Loop(nn.Module):
    """A layer that is used USES times; `by_hand` casts its weights and its input at each use, and hmp does where it is false."""

    def __init__(self, kind: str, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = {
            "linear": lambda: nn.Linear(16, 16),
            "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
            "cell": lambda: nn.GRUCell(16, 16),
        }[kind]()
        self.kind, self.by_hand = kind, by_hand

    def use(self, x: Tensor) -> Tensor:
        given = (x, x) if self.kind == "cell" else (x,)
        if not self.by_hand:
            return self.layer(*given)
        low = {name: weight.to(LOW) for name, weight in self.layer.named_parameters()}
        with products_as_computed():
            return torch.func.functional_call(self.layer, low, tuple(each.to(LOW) for each in given))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(USES):
            x = torch.sin(self.use(x).float())
        return x

    def batch(self) -> Tensor:
        torch.manual_seed(1)
        return torch.randn((2, 4, 6, 6) if self.kind == "conv" else (8, 16), requires_grad=True)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().sum()

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.layer.parameters())

    @property
    def grads(self) -> Grads:
        return tuple(None if weight.grad is None else weight.grad.clone() for weight in self.weights)


# --- what is asked of the graph; each returns what is to be the same --------------------------------------------------------


def some_inputs_only(model: Loop) -> Any:
    x = model.batch()
    value = model.loss(x)
    weight, bias = model.weights[0], model.weights[-1]
    return [torch.autograd.grad(value, asked, retain_graph=True) for asked in ([bias], [weight], [x], [x, weight])]


def differentiated_anew(model: Loop) -> Any:
    """A second forward and backward in one region, whose copies the first one's backward went through; and one graph three times."""
    x, seen = model.batch(), []
    for _ in range(2):
        value = model.loss(x)
        for _ in range(2):
            value.backward(retain_graph=True)
            seen.append(model.grads)
        value.backward()
        seen.append(model.grads)
    return seen, x.grad


def differentiated_twice(model: Loop) -> Any:
    x = model.batch()
    found = torch.autograd.grad(model.loss(x), [x, *model.weights], create_graph=True)
    sum(each.square().sum() for each in found).backward()
    return found, x.grad, model.grads


def hooks_of_the_weight(model: Loop) -> Any:
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    model.weights[0].register_hook(lambda grad: seen[0].append(grad.clone()) or grad * 2)
    model.weights[1].register_post_accumulate_grad_hook(lambda weight: seen[1].append(weight.grad.clone()))
    for _ in range(2):
        model.loss(model.batch()).backward()
    assert list(map(len, seen)) == [2, 2]  # once a backward, however often the weight is used
    return seen, model.grads


def stopped_in_the_middle(model: Loop) -> Any:
    """An exception in the third use's backward; then the same graph again, and a new one."""
    x = model.batch()
    middle = [x]
    for _ in range(USES):
        middle.append(torch.sin(model.use(middle[-1]).float()))

    def fail(grad: Tensor) -> None:
        raise KeyError("stopped")

    handle = middle[2].register_hook(fail)
    value = middle[-1].square().sum()
    with pytest.raises(KeyError, match="stopped"):
        value.backward(retain_graph=True)
    handle.remove()
    after = model.grads
    value.backward()
    model.loss(x).backward()
    return after, x.grad, model.grads


def written_between_two_uses(model: Loop) -> Any:
    x = model.batch()
    first = model(x)
    with torch.no_grad():
        for weight in model.weights:
            weight.mul_(0.5)
    second = model(first)
    for weight in model.weights:
        weight.data = weight.data * 2
    third = model(second)
    third.square().sum().backward()
    return first, second, third, x.grad, model.grads


def frozen_in_the_middle(model: Loop) -> Any:
    x = model.batch()
    first = model(x)
    model.requires_grad_(False)
    second = model(first)
    model.requires_grad_(True)
    model(second).square().sum().backward()
    return x.grad, model.grads


def gradients_that_are_written_in_place(model: Loop) -> Any:
    for _ in range(2):
        found = torch.autograd.grad(model.loss(model.batch()), model.weights)
        for grad in found:
            grad.detach_().mul_(2).requires_grad_()

    def double(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            return grad.mul_(2)

    handles = [weight.register_hook(double) for weight in model.weights]
    model.loss(model.batch()).backward()
    for handle in handles:
        handle.remove()
    return found, model.grads


def a_parameter_that_is_cut_from_its_graph(model: Loop) -> Any:
    """detach_() is no write, and changes where gradients flow to."""
    x, old = model.batch().detach(), [torch.ones_like(weight, requires_grad=True) for weight in model.weights]
    for weight, factor in zip(model.weights, old, strict=True):
        weight.requires_grad_(False).mul_(factor)
    model(x)
    for weight in model.weights:
        weight.detach_().requires_grad_(True)
    model.loss(x).backward()
    return model.grads, [factor.grad for factor in old]


# asked of convolutions and cells too
OF_EVERY_KIND = ("some_inputs_only", "differentiated_twice", "written_between_two_uses", "frozen_in_the_middle")
QUESTIONS: dict[str, Callable[[Loop], Any]] = {
    name: value
    for name, value in list(globals().items())
    if inspect.isfunction(value) and value.__module__ == __name__ and list(inspect.signature(value).parameters) == ["model"]
}


@pytest.mark.parametrize("kind", ["linear", "conv", "cell"])
def test_r21_gradients_are_those_of_a_cast_for_each_use(kind: str) -> None:
    with hmp.convert(policy=hmp.Policy("nothing listed")):  # so that torch is patched once
        for name, question in QUESTIONS.items():
            if kind == "linear" or name in OF_EVERY_KIND:
                compare(name, question, kind)


def compare(name: str, question: Callable[[Loop], Any], kind: str) -> None:
    wanted = question(Loop(kind, by_hand=True))
    with hmp.casts(POLICY):
        found = question(Loop(kind, by_hand=False))
    # float32's rounding where a write parts the uses into several sums; a weight's second derivatives by hand are summed in bfloat16 too
    most = 2**-8 if name == "differentiated_twice" else 1e-6
    for ours, theirs in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        if theirs is None:
            assert ours is None, name
        else:
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
            assert (ours - theirs).detach().norm() <= most * theirs.detach().norm(), name


MANY = 80  # uses, after which sums in bfloat16 are far from those in float32
AUTOCAST_FOR_EACH = {"device_type": "cpu", "dtype": torch.bfloat16, "cache_enabled": False}


class Steps(nn.Module):
    """A layer in a loop, or an op of many steps, which is called once."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, xs: Tensor) -> Tensor:
        if isinstance(self.layer, nn.RNNBase):
            return self.layer(xs)[0]
        state: Any = None if isinstance(self.layer, nn.RNNCellBase) else torch.zeros_like(xs[0])
        for x in xs:
            state = self.layer(x, state) if isinstance(self.layer, nn.RNNCellBase) else torch.sin(self.layer(state).to(x.dtype) + x)
        return state[0] if isinstance(state, tuple) else state


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 16), (4, 16)),
    "conv": (lambda: nn.Conv2d(4, 4, 3, padding=1), (2, 4, 5, 5)),
    "gru cell": (lambda: nn.GRUCell(16, 16), (4, 16)),
    "lstm cell": (lambda: nn.LSTMCell(16, 16), (4, 16)),
    "rnn cell": (lambda: nn.RNNCell(16, 16), (4, 16)),
    "gru": (lambda: nn.GRU(16, 24), (4, 16)),
    "rnn": (lambda: nn.RNN(16, 24), (4, 16)),
    "lstm": (lambda: nn.LSTM(16, 24), (4, 16)),
}
NO_SUMS = ("lstm",)  # torch's kernel sums in float32 itself


@pytest.mark.native_kernels
@pytest.mark.parametrize("name", LAYERS)
def test_r21_many_uses_have_the_error_of_a_cast_for_each_and_keep_what_autocast_keeps(name: str) -> None:
    make, shape = LAYERS[name]
    if name == "lstm":
        autocast_kit.needs_autocasts_lstm()
    torch.manual_seed(0)
    model, xs = Steps(make()), torch.randn(MANY, *shape)

    def gradients_of(model: nn.Module, xs: Tensor, region: Any) -> Tensor:
        with region:
            result = model(xs).to(xs.dtype)
        loss = (result * torch.linspace(0, 1, result.numel(), dtype=xs.dtype).view(result.shape)).mean()  # every step pulls one way
        return torch.cat([each.double().flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])

    exact = gradients_of(copy.deepcopy(model).double(), xs.double(), contextlib.nullcontext())
    regions = {"hmp": hmp.casts("torch-cpu"), "once": torch.autocast("cpu", LOW), "each": torch.autocast(**AUTOCAST_FOR_EACH)}
    errors = {way: float((gradients_of(model, xs, region) - exact).norm() / exact.norm()) for way, region in regions.items()}
    assert errors["hmp"] <= 1.1 * errors["each"]
    assert errors["once"] > 1.2 * errors["each"] or name in NO_SUMS
    with hmp.casts("torch-cpu"):
        ours, _ = kept_for_backward(lambda: model(xs))
    with torch.autocast("cpu", LOW):
        theirs, _ = kept_for_backward(lambda: model(xs))
    assert ours <= 1.02 * theirs
