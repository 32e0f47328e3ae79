"""A weight that one graph uses many times, by one copy and one node: whatever is asked of the graph, its gradients are those of plain
torch where each use casts by hand (R21)."""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hmp
from low_kernels_kit import products_as_computed

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


def two_losses_of_one_graph(model: Loop) -> Any:
    middle = model(model.batch())
    (one,) = torch.autograd.grad(middle.sum(), model.weights[:1], retain_graph=True)
    model.loss(middle).backward()
    return one, model.grads


def differentiated_twice(model: Loop) -> Any:
    x = model.batch()
    found = torch.autograd.grad(model.loss(x), [x, *model.weights], create_graph=True)
    sum(each.square().sum() for each in found).backward()
    return found, x.grad, model.grads


def hooks_of_the_weight(model: Loop) -> Any:
    seen: list[Tensor] = []
    model.weights[0].register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    model.weights[1].register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    for _ in range(2):
        model.loss(model.batch()).backward()
    assert len(seen) == 4  # once a backward, however often the weight is used
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
    for weight in model.weights:
        weight.data.mul_(0.5)
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


def swapped_while_no_graph_is_left(model: Loop) -> Any:
    x = model.batch()
    averaged = [nn.Parameter(weight.detach() * 0.5) for weight in model.weights]
    seen = []
    for _ in range(4):
        for weight, other in zip(model.weights, averaged, strict=True):
            torch.utils.swap_tensors(weight, other)
        seen.append([model.loss(x).detach() for _ in range(3)])
    model.loss(x).backward()
    return seen, x.grad, model.grads


def freed_with_their_last_graph(model: Loop) -> Any:
    """By reference counts, without the garbage collector: a weight that is gone takes no memory, whatever graphs were made of it."""
    other = copy.deepcopy(model)
    for _ in range(3):
        value = other.loss(model.batch())
    dead = [weakref.ref(weight) for weight in other.weights]
    gc.disable()
    try:
        del value, other
        assert [reference() for reference in dead] == [None] * len(dead)
    finally:
        gc.enable()


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


def gradients_by_function(model: Loop) -> Any:
    x, names = model.batch().detach(), dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (row[None],)).square().sum()

    together = torch.func.grad(lambda weights: sum(loss(weights, row) for row in x[:3]))(names)
    return list(together.values()), torch.autograd.functional.vjp(model, x, torch.ones_like(x))


# asked of convolutions and cells too
OF_EVERY_KIND = ("some_inputs_only", "differentiated_twice", "written_between_two_uses", "frozen_in_the_middle", "gradients_by_function")
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


@pytest.mark.parametrize("kind", ["linear", "conv", "cell"])
def test_r21_one_graph_holds_one_copy_of_each_weight_also_after_single_uses(kind: str) -> None:
    # what makes the test above one of shared copies: without it every question would pass by casting at each use. And a model that is
    # warmed up by single uses would keep a copy for each use for ever after
    for warm_up in ([USES], [1] * 4 + [3] * 40):
        model = Loop(kind, by_hand=False)
        optimizer = torch.optim.SGD(model.weights, lr=0.01)
        with hmp.casts(POLICY):
            for uses in warm_up:
                x = model.batch()
                for _ in range(uses):
                    x = torch.sin(model.use(x).float())
                x.sum().backward()
                optimizer.step()
            before = hmp.cache_info().hits
            model.loss(model.batch())
        assert hmp.cache_info().hits - before >= (USES - 1) * len(model.weights), warm_up


@pytest.mark.slow
def test_no_python_code_runs_where_a_weight_is_freed() -> None:
    # it may be freed inside of C++ or by a thread that is not Python's, and code in Python hands the GIL on
    called: list[str] = []
    with hmp.casts(POLICY):
        model = Loop("linear", by_hand=False)
        for _ in range(40):  # used once until the next write, then kept
            model.use(model.batch()).sum().backward()
            for each in model.parameters():
                each.data.mul_(0.5)
        x = model.batch()
        model.use(model.use(x).float())
        weights = list(model.weights)
        del model
        gc.collect()
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
        try:
            weights.clear()
        finally:
            sys.setprofile(None)
    assert called == []


def test_r21_parameters_that_share_memory_and_a_copy_have_gradients_of_their_own() -> None:
    one, x = nn.Parameter(torch.ones(16, 16)), torch.ones(2, 16, requires_grad=True)  # so that graphs keep the weight
    with hmp.casts(POLICY):
        values = [nn.functional.linear(x, one) for _ in range(3)]
        other = nn.Parameter(one.data)  # marked memory stays so
        before = hmp.cache_info().hits
        values.append(nn.functional.linear(3 * x, other))
        assert hmp.cache_info().hits == before + 1
    sum(value.float().sum() for value in values).backward()
    assert torch.equal(one.grad, torch.full((16, 16), 6.0)) and torch.equal(other.grad, torch.full((16, 16), 6.0))
