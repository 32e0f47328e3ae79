"""Functions of the user's own, in every form and by every way to make them ops: the decorators, hmp.register, dotted names in list files.

One op, one decision, and nothing of theirs is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import operator
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp
from trap_kit import policy

ONE = torch.ones(1)
LOW, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32


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
    hmp.revert()
    before = dict(vars(Ops))
    for name in ("of_class", "static", "method", "in_c"):
        hmp.register(Ops, name, "bf16")
    with hmp.casts("habana"):
        assert MoreOps.of_class(ONE) == ("MoreOps", LOW)
        assert Ops().of_class(ONE) == ("Ops", LOW)
        assert Ops.static(ONE) is Ops().static(ONE) is LOW
        assert MoreOps().method(ONE) == ("MoreOps", LOW)
        assert Ops.in_c(ONE).dtype is Ops().in_c(ONE).dtype is LOW
        assert Ops.decorated_static(ONE) is Ops().decorated_static(ONE) is LOW
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hmp.revert()
    assert all(vars(Ops)[name] is value for name, value in before.items())
    assert MoreOps.of_class(ONE) == ("MoreOps", torch.float32)


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


@pytest.mark.parametrize("name", ["torch.nn.ReLU", "torch.save", "fractions.Fraction"])
def test_classes_and_torchs_other_functions_are_no_ops(name: str) -> None:
    with pytest.raises(hmp.errors.OpListError, match="no"):
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

        @hmp.bf16_function
        def loss(self, out):
            return out.dtype

    low = ONE.bfloat16()
    with hmp.casts("habana"):
        assert loss(low, low) == (torch.float32, torch.float32)
        assert dtypes(ONE, ONE, ONE) == (LOW, LOW, LOW)
        assert Layer().act(low[None], ONE[None], True) is Layer().loss(ONE) is LOW


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


@hmp.bf16_function
def _append_last(x, *more):
    more[-1].add_(x)


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
        with pytest.raises(hmp.HmpError, match="wrote into its argument `argument 3`, which"):
            _append_last(ONE, ONE, torch.zeros(1))
        # what was not cast is written, as ever
        history, promoted = torch.zeros(2, dtype=LOW), torch.zeros(2)
        _append(history, ONE)
        _append_promoted(promoted, ONE.to(LOW))
        with hmp.disable_casts():
            wide = torch.zeros(2)
            _append(wide, ONE)
        assert history.tolist() == wide.tolist() == [0, 1]
        assert promoted.tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["generator", "coroutine"])
def test_r10_a_write_in_a_generator_or_a_coroutine_is_an_error_where_it_ends(kind: str) -> None:
    @hmp.bf16_function
    def writing(x, states):
        sent = yield x.dtype
        states.append(sent)
        try:
            yield
        except KeyError:
            x.add_(1)
        return x.dtype

    @hmp.bf16_function
    async def awaited(x, states):
        states.append("sent")
        await asyncio.sleep(0)
        x.add_(1)

    held, states = torch.ones(2), [torch.ones(2)]
    with hmp.casts("habana"):
        talk = writing(held, states)
        assert next(talk) is LOW
        talk.send("sent")
        ends = functools.partial(talk.throw, KeyError) if kind == "generator" else lambda: asyncio.run(awaited(held, states))
        with pytest.raises(hmp.HmpError, match="wrote into its argument `x`"):
            ends()
    assert held.tolist() == [1, 1] and states[1] == "sent" and states[0].dtype is torch.float32


def test_r10_what_a_users_function_returns_of_its_argument_is_a_view_of_the_copy() -> None:
    """As of any op whose input was cast: what is written into it stays there."""
    kept: list[torch.Tensor] = []

    @hmp.bf16_function
    def rows(x):
        kept.append(x)
        return x[:1], x

    held = torch.ones(2, 2)
    with hmp.casts("habana"):
        first, whole = rows(held)
        first.zero_()
        whole[1] = 3
    assert type(first) is type(whole) is torch.Tensor and whole.tolist() == kept[0].tolist() == [[0, 0], [3, 3]]
    assert held.tolist() == [[1, 1], [1, 1]]


# What a function does to a list and a dict that it is given.
CHANGES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "append": lambda c, x: c["list"].append(x),
    "insert": lambda c, x: c["list"].insert(0, x),
    "pop": lambda c, x: c["list"].pop(),
    "reverse": lambda c, x: c["list"].reverse(),
    "swap for its double": lambda c, x: c["list"].__setitem__(0, c["list"][0] * 2),
    "clear": lambda c, x: c["list"].clear(),
    "set": lambda c, x: c.update(k=x),
    "set a new key": lambda c, x: c.update(new=[x]),
    "delete": lambda c, x: c.pop("k", None),
    "in a tuple": lambda c, x: c["pair"][1].append(x),
    "one in another": lambda c, x: c["list"].append(c["pair"][0]),
    "nothing": lambda c, x: None,
}


def _container() -> dict[str, Any]:
    return {"list": [torch.full((2,), 2.0), torch.full((2,), 3.0)], "k": torch.zeros(2), "pair": (torch.ones(2), ["text"])}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value


@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=5), st.booleans())
def test_r10_a_change_of_a_list_or_dict_is_made_in_the_callers(names: list[str], fails: bool) -> None:
    def change(states: dict[str, Any], x: torch.Tensor) -> torch.dtype:
        for name in names:
            with contextlib.suppress(IndexError):
                CHANGES[name](states, x)
        if fails:
            raise KeyError("after the changes")
        return x.dtype

    wanted, found, x = _container(), _container(), torch.full((2,), 5.0)
    before = {id(t) for t in (*found["list"], found["k"], found["pair"][0])}
    lists = found["list"], found["pair"][1]
    for states, called in ((wanted, change), (found, hmp.bf16_function(change))):
        with hmp.casts("habana"), contextlib.suppress(KeyError):
            assert called(states, x) is (LOW if called is not change else torch.float32)
    assert _plain(found) == _plain(wanted)
    assert found["list"] is lists[0] and found["pair"][1] is lists[1]
    left = [*found["list"], *([found["k"]] if "k" in found else [])]
    if "swap for its double" not in names:  # what the function did not compute is the caller's own tensor, and so is x
        assert all(id(t) in before or t is x for t in left)


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


@hmp.bf16_function
def fused_low(q, k, *, mask=None, parts=()):
    """Docs of it."""
    inside = torch.softmax(q, -1).dtype
    return q.dtype, k.dtype, None if mask is None else mask.dtype, [part.dtype for part in parts], inside


@hmp.fp32_function
def fused_wide(q, k):
    return q.dtype, k.dtype, torch.relu(q).dtype


@hmp.promote_function
def fused_widest(q, *rest):
    return [q.dtype, *(each.dtype for each in rest)]


def ones(dtype, *shape):
    return torch.ones(shape or (2,), dtype=dtype)


def test_register_decorators_cast_where_a_policy_is_in_force():
    arguments = {"mask": ones(torch.bool), "parts": (ones(WIDE), ones(HALF), ones(torch.float64).long())}
    with hmp.casts("habana"):
        low = fused_low(ones(WIDE), ones(HALF), **arguments)
        assert low == (LOW, LOW, torch.bool, [LOW, LOW, torch.int64], LOW)
        assert fused_wide(ones(LOW), ones(torch.int64)) == (WIDE, torch.int64, WIDE)
        assert fused_widest(ones(LOW), ones(WIDE), ones(torch.int64)) == [WIDE, WIDE, torch.int64]
        assert fused_widest(ones(LOW), ones(HALF)) == [WIDE, WIDE]
        assert fused_low(ones(torch.float64), ones(WIDE))[:2] == (torch.float64, WIDE)


def test_register_decorators_do_nothing_elsewhere():
    assert fused_low(ones(WIDE), ones(HALF)) == (WIDE, HALF, None, [], WIDE)
    with hmp.casts("habana"), hmp.disable_casts():
        assert fused_low(ones(WIDE), ones(HALF)) == (WIDE, HALF, None, [], WIDE)
        assert fused_widest(ones(LOW), ones(WIDE)) == [LOW, WIDE]


def test_register_decorated_functions_look_like_themselves():
    assert (fused_low.__name__, fused_low.__doc__) == ("fused_low", "Docs of it.")
    assert list(inspect.signature(fused_low).parameters) == ["q", "k", "mask", "parts"]


@pytest.mark.parametrize("given", [torch.nn.Linear, 3], ids=["a class", "a number"])
def test_register_decorates_functions_alone(given):
    with pytest.raises(hmp.HmpError, match=r"@hmp\.bf16_function expected a function, got"):
        hmp.bf16_function(given)


def test_register_before_and_after_convert():
    library = types.SimpleNamespace(attention=lambda q, k: (q.dtype, k.dtype))
    hmp.convert()
    hmp.register(library, "attention", "bf16")
    assert library.attention(ones(WIDE), ones(WIDE)) == (LOW, LOW)
    with hmp.casts(policy(bf16=["relu"], dtype=HALF)):
        assert library.attention(ones(WIDE), ones(WIDE)) == (HALF, HALF)
    hmp.convert(policy="bert")
    assert library.attention(ones(WIDE), ones(WIDE)) == (LOW, LOW)


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (F, "nosuch", "expected a function of torch.nn.functional, got 'nosuch'; pass the module or class"),
        (torch, 3, "expected a function of torch, got 3; pass the module or class"),
        (F, "relu", "got torch's torch.nn.functional.relu; put 'relu' on a list of the policy instead"),
        (torch.linalg, "inv", "got torch's torch.linalg.inv; put 'linalg.inv' on a list of the policy instead"),
        (torch.Tensor, "__add__", "got torch's Tensor.__add__; put 'add' on a list of the policy instead"),
        (torch, "save", "got torch's torch.save; register a function of your own that calls it"),
    ],
)
def test_register_says_of_what_is_in_torch_what_it_is(owner, name, message):
    with pytest.raises(hmp.HmpError, match=re.escape(message)):
        hmp.register(owner, name, "bf16")
    assert {"relu", "linalg.inv", "add"} == hmp.Policy(bf16={"relu", "linalg.inv", "add"}).bf16, "what it advises is possible"


def steps(x, *, log):
    """What a generator can be told, and what it says."""
    log.append(("begins", x.dtype))
    try:
        got = yield x.dtype
        while got is not None:
            try:
                got = yield got * 2
            except KeyError as error:
                got = yield ("caught", error.args)
        return "returned"
    finally:
        log.append("ended")


@types.coroutine
def awaited_by_old_hands(x):
    got = yield x.dtype
    return x.dtype, got


async def coroutine(x):
    await asyncio.sleep(0)
    return x.dtype


def drive(generator):
    """What it answers to next, send, throw and the end."""
    answers = [next(generator), generator.send(3), generator.throw(KeyError("k")), generator.send(4)]
    with pytest.raises(StopIteration) as end:
        generator.send(None)
    return [*answers, end.value.value]


@pytest.fixture
def registered():
    owner = types.ModuleType("owner")
    for function in (steps, awaited_by_old_hands, coroutine):
        copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
        setattr(owner, function.__name__, copy)
        hmp.register(owner, function.__name__, "bf16")
    return owner


def test_register_a_generator_is_sent_to_thrown_into_closed_and_returns(registered):
    log, plain_log = [], []
    with hmp.convert():
        assert inspect.isgeneratorfunction(registered.steps)
        answers = drive(registered.steps(torch.ones(1), log=log))
        left = registered.steps(torch.ones(1), log=log)
        next(left)
        left.close()
        left = registered.steps(torch.ones(1), log=log)
        next(left)
        with pytest.raises(ZeroDivisionError):
            left.throw(ZeroDivisionError)
    x = torch.ones(1, dtype=LOW)
    assert answers == drive(steps(x, log=plain_log)) == [LOW, 6, ("caught", ("k",)), 8, "returned"]
    assert log == [("begins", LOW), "ended"] * 3


def test_register_a_coroutine_is_awaited(registered):
    with hmp.convert():
        assert inspect.iscoroutinefunction(registered.coroutine)
        assert asyncio.run(registered.coroutine(torch.ones(1))) is LOW
        old = registered.awaited_by_old_hands(torch.ones(1))
        assert inspect.isawaitable(old)
        assert old.send(None) is LOW
        with pytest.raises(StopIteration) as end:
            old.send("sent")
        assert end.value.value == (LOW, "sent")


def test_an_asynchronous_generator_is_refused():
    """In its steps lists would apply, though it is one op."""

    @hmp.fp32_function
    async def products(x):
        yield (x @ x).dtype

    async def first():
        with hmp.casts("habana"):
            return [each async for each in products(torch.ones(2, 2))]

    with pytest.raises(hmp.HmpError, match="async generator"):
        asyncio.run(first())
