"""Functions of the user's own, in every form that they come in: one op, one decision, and nothing of theirs is lost."""

from __future__ import annotations

import asyncio
import functools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp

ONE = torch.ones(1)
LOW = torch.bfloat16


class Ops:
    @classmethod
    def of_class(cls, x):
        return cls.__name__, x.dtype

    @staticmethod
    def static(x):
        return x.dtype

    def method(self, x):
        return type(self).__name__, x.dtype

    in_c = operator.neg

    @hmp.bf16_function
    @staticmethod
    def decorated_static(x):
        return x.dtype


class MoreOps(Ops):
    pass


def test_registered_methods_keep_their_class_and_their_self() -> None:
    for name in ("of_class", "static", "method", "in_c"):
        hmp.register(Ops, name, "bf16")
    with hmp.casts("habana"):
        assert MoreOps.of_class(ONE) == ("MoreOps", LOW)
        assert Ops().of_class(ONE) == ("Ops", LOW)
        assert Ops.static(ONE) is Ops().static(ONE) is LOW
        assert MoreOps().method(ONE) == ("MoreOps", LOW)
        assert Ops.in_c(ONE).dtype is Ops().in_c(ONE).dtype is LOW
        assert Ops.decorated_static(ONE) is Ops().decorated_static(ONE) is LOW
    hmp.revert()
    assert Ops.__dict__["in_c"] is operator.neg
    assert MoreOps.of_class(ONE) == ("MoreOps", torch.float32)


@pytest.mark.slow
def test_torchs_own_function_under_a_users_name_is_no_op_of_the_users(monkeypatch) -> None:
    """It is one op wherever it stands: on a list of one policy and registered for all it would follow whichever was looked up."""
    holder = types.ModuleType("hmp_test_holder")
    monkeypatch.setitem(sys.modules, "hmp_test_holder", holder)
    for function, op in ((torch.sin, "sin"), (F.softmax, "softmax"), (torch.linalg.norm, "linalg.norm"), (torch.Tensor.mul, "mul")):
        holder.function = function
        for _ in range(2):  # as it is, and while it is patched
            with pytest.raises(hmp.HmpError, match=rf"got torch's hmp_test_holder.function; put '{op}' on a list"):
                hmp.register(holder, "function", "bf16")
            with pytest.raises(hmp.OpListError, match=rf"expected the op's own name '{op}', got 'hmp_test_holder.function'; write '{op}'"):
                hmp.Policy(bf16={"hmp_test_holder.function"})
            hmp.convert(policy=hmp.Policy(fp32={op}))
        hmp.revert()


def test_what_a_users_function_writes_into_is_not_cast(monkeypatch) -> None:
    def fill(x, out):
        assert x.dtype is LOW
        return out.copy_(x)

    def maybe(x, inplace=False):
        return x.add_(1) if inplace else x + 1

    module = types.ModuleType("hmp_test_ops")
    module.fill, module.maybe = fill, maybe
    monkeypatch.setitem(sys.modules, "hmp_test_ops", module)
    with hmp.casts(hmp.Policy(bf16={"hmp_test_ops.fill", "hmp_test_ops.maybe"})):
        for call in (lambda out: module.fill(ONE, out=out), lambda out: module.fill(ONE, out)):
            out = torch.zeros(1)
            assert call(out) is out
            assert out.item() == 1
        x = torch.zeros(1)
        assert module.maybe(x, inplace=True) is x
        assert x.item() == 1
        assert module.maybe(x).dtype is LOW


def test_coroutines_and_generators_are_one_op_until_they_end() -> None:
    @hmp.fp32_function
    async def wait(x):
        await asyncio.sleep(0)
        return (x @ x).dtype, hmp.casts_enabled()

    @hmp.fp32_function
    def steps(x):
        for _ in range(2):
            yield (x @ x).dtype

    square = torch.ones(2, 2).bfloat16()
    with hmp.casts("habana"):
        assert asyncio.run(wait(square)) == (torch.float32, False)
        seen = []
        for dtype in steps(square):
            seen += [dtype, hmp.casts_enabled()]
        assert seen == [torch.float32, True] * 2


@pytest.mark.parametrize("name", ["torch.nn.ReLU", "torch.save", "fractions.Fraction"])
def test_classes_and_torchs_other_functions_are_no_ops(name: str) -> None:
    with pytest.raises(hmp.OpListError, match="no"):
        hmp.Policy(bf16={name})


def test_out_is_kept_only_where_it_is_optional_and_positions_are_the_callers() -> None:
    @hmp.fp32_function
    def loss(out, target):  # a model's output, not a place to write to
        return out.dtype, target.dtype

    def with_context(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function("context", *args)

        return wrapper

    @hmp.bf16_function
    @with_context
    def dtypes(context, x, out, y):
        return x.dtype, out.dtype, y.dtype

    class Layer:
        @hmp.bf16_function
        def act(self, x, w, inplace=False):
            return torch.nn.functional.linear(x, w).dtype

    low = ONE.bfloat16()
    with hmp.casts("habana"):
        assert loss(low, low) == (torch.float32, torch.float32)
        assert dtypes(ONE, ONE, ONE) == (LOW, LOW, LOW)
        assert Layer().act(low[None], ONE[None], True) is LOW


def test_a_registered_method_of_one_instance_is_not_that_of_all() -> None:
    class Single:
        def method(self, x):
            return type(self).__name__, x.dtype

    one, other = Single(), Single()
    hmp.register(one, "method", "bf16")
    with hmp.casts("habana"):
        assert one.method(ONE) == ("Single", LOW)
        assert other.method(ONE) == ("Single", torch.float32)
    hmp.revert()
    assert vars(one) == {}


@hmp.bf16_function
def _append(history, x):
    history[-1:].copy_(x.sum())
    return x * 2


@hmp.promote_function
def _append_promoted(history, x):
    history.add_(x.sum())
    return x


MODES = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_r10_a_write_into_an_argument_that_was_cast_is_an_error(mode) -> None:
    lost = "wrote into its argument `history`, which was cast from .* to %s for the call, so the write is lost"
    with mode(), hmp.casts("habana"):
        with pytest.raises(hmp.HmpError, match=f"_append {lost % 'bfloat16'}"):
            _append(torch.zeros(2), ONE)
        with pytest.raises(hmp.HmpError, match=f"_append_promoted {lost % 'float32'}"):
            _append_promoted(x=ONE, history=torch.zeros(2, dtype=LOW))
        # what was not cast is written, as ever
        history, promoted = torch.zeros(2, dtype=LOW), torch.zeros(2)
        _append(history, ONE)
        _append_promoted(promoted, ONE.to(LOW))
        with hmp.disable_casts():
            wide = torch.zeros(2)
            _append(wide, ONE)
        assert history.tolist() == wide.tolist() == [0, 1]
        assert promoted.tolist() == [1, 1]


class Node:
    def __init__(self, x: torch.Tensor) -> None:
        self.me, self.inside = self, [x[:1]]


def _yielding(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from x.split(1)


RESULTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "generator": (_yielding, next),
    "set": (lambda x: set(x.split(1)), lambda found: found.pop()),
    "deque": (lambda x: deque(x.split(1)), lambda found: found.pop()),
    "object": (Node, lambda found: found.me.inside[0]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_r10_a_write_into_what_comes_out_of_a_result_is_an_error(name: str) -> None:
    make, first = RESULTS[name]
    called, held = hmp.bf16_function(lambda x: make(x)), torch.ones(2)
    with hmp.casts("habana"):
        assert first(called(held)).sum() == 1
        with pytest.raises(hmp.HmpError, match=r"would be lost: the input of .* was cast"):
            first(called(held)).zero_()
    assert held.tolist() == [1, 1]


def test_r10_a_generator_that_a_function_returns_is_sent_to_thrown_into_and_closed() -> None:
    said = []

    @hmp.bf16_function
    def talking(x):
        try:
            said.append((yield x))
            try:
                yield x[:1]
            except KeyError as error:
                said.append(error.args[0])
            yield from (x,)
            return x[1:]
        finally:
            said.append("closed")

    held = torch.ones(2)
    with hmp.casts("habana"):
        talk = talking(held)
        assert next(talk).dtype is LOW and talk.send("sent").shape == (1,) and talk.throw(KeyError("thrown")).shape == (2,)
        with pytest.raises(StopIteration) as end:
            next(talk)
        with pytest.raises(hmp.HmpError):
            end.value.value.zero_()
        talk = talking(held)
        next(talk)
        talk.close()
    assert said == ["sent", "thrown", "closed", "closed"]


def test_functions_that_write_nothing_run_under_transforms_of_torch() -> None:
    @hmp.bf16_function
    def doubled(x, pair):
        return x * 2 + pair[0]

    x = torch.randn(3, 2)
    with hmp.casts("habana"):
        expected = x.bfloat16() * 2 + x.bfloat16()
        assert torch.equal(torch.func.vmap(lambda row: doubled(row, (row,)))(x), expected)
        assert torch.equal(torch.func.grad(lambda row: doubled(row, [row]).sum())(x), torch.full_like(x, 3))
        assert torch.equal(torch.jit.trace(lambda a: doubled(a, (a,)), (x,))(x), expected)
