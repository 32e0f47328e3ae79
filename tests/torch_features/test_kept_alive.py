"""Nothing of hmp's keeps a class, a model, an optimizer, a function or a tensor alive after its last user, nor grows with their number."""

from __future__ import annotations

import contextlib
import gc
import pickle
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy

POLICY = policy(bf16=["linear", "exp"], fp32=["softmax"])
X = torch.ones(2, 4)
AROUND: dict[str, Callable[[], Any]] = {
    "casts": lambda: hmp.casts(POLICY),
    "convert": lambda: hmp.convert(policy=POLICY),
    "apply": lambda: _applied(),
}


@contextlib.contextmanager
def _applied() -> Iterator[None]:
    kept = hmp.apply(torch.nn.Linear(2, 2), POLICY)  # so that torch stays patched
    yield
    hmp.remove(kept)


def _class() -> type[torch.nn.Module]:
    class Made(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)

        @classmethod
        def from_config(cls):
            return cls()

    return Made


def model(apply: bool) -> tuple[Any, ...]:
    made = _class()()
    hmp.apply(made, POLICY) if apply else None
    x = X.clone()
    result = made(x)
    result.float().sum().backward()
    return made, type(made), x, result


def removed_model(apply: bool) -> tuple[Any, ...]:
    made = hmp.apply(_class().from_config(), POLICY, outputs="float32", methods=("forward",))
    result = made(X)
    hmp.remove(made)
    return made, type(made), result


def optimizer(apply: bool) -> tuple[Any, ...]:
    class Stepping(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    made, cls, *_ = model(apply)
    stepping = Stepping(made.parameters(), 0.1)
    stepping.step()
    return stepping, Stepping, made, cls


def tensor(apply: bool) -> tuple[Any, ...]:
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Plain(torch.Tensor):
        pass

    made = X.clone().as_subclass(Plain)
    return Tagged, Plain, made, F.linear(made, torch.ones(4, 4)), made.exp()


def function(apply: bool) -> tuple[Any, ...]:
    @hmp.bf16_function
    def scaled(x, again=True):
        return scaled(x, False) if again else x * 2

    @hmp.casts(POLICY)
    def cast(x):
        return F.linear(x, x)

    return scaled, scaled.__wrapped__, scaled(X), cast, cast.__wrapped__, cast(torch.ones(2, 2))


def graph(apply: bool) -> tuple[Any, ...]:
    made = hmp.apply(torch.fx.symbolic_trace(_class()()), POLICY)
    return made, type(made), made(X)


MADE = (model, removed_model, optimizer, tensor, function, graph)


def _alive(make: Callable[[bool], tuple[Any, ...]], apply: bool, times: int) -> list[str]:
    references = [weakref.ref(each) for _ in range(times) for each in make(apply)]
    gc.collect()
    return [repr(found)[:80] for each in references if (found := each()) is not None]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_nothing_is_kept_alive_and_nothing_grows(make: Callable[[bool], tuple[Any, ...]], around: str) -> None:
    with AROUND[around]():
        assert not _alive(make, around == "apply", 8)  # what is made once is there now
        hmp.memory.clear_cache()
        gc.collect()
        before = len(gc.get_objects())
        assert not _alive(make, around == "apply", 8)
        hmp.memory.clear_cache()  # copies that the block around the rounds would keep to its end
        gc.collect()
        assert make is graph or len(gc.get_objects()) - before < 8  # torch.fx itself keeps the code that it generates


OPS = ("relu", "softmax", "mul", "add", "gelu", "tanh", "sigmoid")


@pytest.mark.slow
def test_policies_that_were_tried_one_after_another_are_let_go_of() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))

    def alive() -> int:
        gc.collect()
        return sum(isinstance(each, hmp.Policy) for each in gc.get_objects())

    before = alive()
    for number in range(128):
        tried = policy(bf16=["linear @ 0"], fp32=["linear", *(op for bit, op in enumerate(OPS) if number >> bit & 1)])
        with hmp.casts(tried, model=model):
            assert model(X).dtype is torch.bfloat16
    assert alive() - before < 100


def test_a_class_made_where_a_patched_one_was_is_patched_and_those_that_live_are_restored() -> None:
    """Python gives the address of a class that is gone to the next."""
    kept = [hmp.apply(_class()(), POLICY)]
    with hmp.casts(POLICY):
        for _ in range(30):
            made = _class()
            init = vars(made)["__init__"]
            assert made().layer.weight.dtype == torch.float32 and hmp.apply(made(), POLICY)(X).dtype == torch.bfloat16
            del made
    cls = type(kept[0])
    kept.append(cls)
    before = {name for name in vars(cls) if name.startswith("__hmp")}
    hmp.revert()
    after = vars(cls)
    assert before and not any(name.startswith("__hmp") for name in after) and "_call_impl" not in after and "extra_repr" not in after
    assert type(after["__init__"]) is types.FunctionType is not type(init)


def test_a_reducer_of_the_users_own_is_used_for_an_applied_model() -> None:
    cls = type(hmp.apply(torch.nn.Linear(2, 2), POLICY))
    reducers = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    ForkingPickler.register(cls, lambda _: (str, ("own",)))
    try:
        assert pickle.loads(ForkingPickler.dumps(hmp.apply(torch.nn.Linear(2, 2), POLICY))) == "own"
    finally:
        del reducers[cls]
    assert type(pickle.loads(ForkingPickler.dumps(hmp.apply(torch.nn.Linear(2, 2), POLICY)))) is cls
