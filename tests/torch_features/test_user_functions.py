"""Functions of the user's own, in every form that they come in: one op, one decision, and nothing of theirs is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
