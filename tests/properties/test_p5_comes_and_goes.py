"""P5, comes and goes: after any sequence of convert, casts, apply, remove, register, revert, and of patches of others, torch is as it was
found, names taken before are torch's own, every warning points at the caller's line, and a policy does what it does in a fresh process.

Oracle: the snapshot of torch that was taken before hmp was imported, foreign patches apart, and a table of three dtypes for each policy,
written by hand. Rule R16.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import wrapt
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hmp

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
X = torch.ones(2, 2)
# what matmul, tanh and softmax of a float32 tensor give under each
POLICIES = {
    "products": (hmp.Policy("products", bf16={"matmul"}), (BF16, F32, F32)),
    "half": (hmp.Policy("half", bf16={"matmul", "tanh"}, dtype=F16), (F16, F16, F32)),
    "star": (hmp.Policy("star", bf16={"*"}, fp32={"softmax"}), (BF16, BF16, F32)),
    "none": (hmp.Policy("none"), (F32, F32, F32)),
}
taken_matmul, taken_tanh, taken_softmax = torch.matmul, torch.tanh, F.softmax


class Taken:
    matmul = staticmethod(torch.matmul)


ORIGINALS = ((torch.matmul,), (torch.tanh,), (F.softmax,))  # in tuples: hmp leaves those alone


def dtypes() -> tuple[torch.dtype, ...]:
    return torch.matmul(X, X).dtype, torch.tanh(X).dtype, F.softmax(X, -1).dtype


def dtypes_by_taken_names() -> tuple[torch.dtype, ...]:
    found = taken_matmul(X, X).dtype, taken_tanh(X).dtype, taken_softmax(X, -1).dtype
    assert Taken.matmul(X, X).dtype is found[0]
    return found


class World:
    """A process: what is converted, and which models are applied."""

    def __init__(self) -> None:
        self.process = "none"
        self.models: list[tuple[torch.nn.Module, str]] = []
        self.handles: list[tuple[Any, str]] = []  # the `with`s that are open, and what each brings back

    def convert(self, name: str) -> None:
        hmp.convert(policy=POLICIES[name][0])
        self.process = name

    def enter(self, name: str) -> None:
        before = self.process
        self.handles.append((hmp.convert(policy=POLICIES[name][0]).__enter__(), before))
        self.process = name

    def leave(self, name: str) -> None:
        """What was converted inside ends with it, and a handle that is used again does nothing."""
        if self.handles:
            handle, self.process = self.handles.pop()
            handle.__exit__(None, None, None)
            assert dtypes() == POLICIES[self.process][1]
            handle.revert()

    def casts(self, name: str) -> None:
        with hmp.casts(POLICIES[name][0]):
            assert dtypes() == dtypes_by_taken_names() == POLICIES[name][1]

    def apply(self, name: str) -> None:
        model = torch.nn.Sequential(torch.nn.Softmax(-1), torch.nn.Tanh())
        hmp.apply(model, POLICIES[name][0])
        assert model(X).dtype is POLICIES[name][1][1]
        self.models.append((model, name))

    def remove(self, name: str) -> None:
        if self.models:
            model, _ = self.models.pop()
            hmp.remove(model)
            assert model(X).dtype is POLICIES[self.process][1][1]

    def revert(self, name: str) -> None:
        hmp.revert()
        self.process = "none"
        self.models.clear()
        self.handles = [(handle, "none") for handle, _ in self.handles]


STEPS = st.tuples(
    st.sampled_from(["convert", "enter", "leave", "leave", "casts", "apply", "remove", "revert"]), st.sampled_from(sorted(POLICIES))
)


@settings(max_examples=max(3, settings.default.max_examples // 4))
@example(steps=[("enter", "products"), ("enter", "half"), ("convert", "star"), ("leave", ""), ("leave", "")])
@example(steps=[("enter", "products"), ("enter", "half"), ("revert", ""), ("leave", ""), ("leave", "")])
@given(steps=st.lists(STEPS, max_size=10))
def test_p5_whatever_came_torch_is_as_it_was_found(steps: list[tuple[str, str]], torch_differences: Any) -> None:
    hmp.revert()
    assert torch_differences() == []
    world = World()
    for step, name in steps:
        getattr(world, step)(name)
        assert dtypes() == POLICIES[world.process][1], f"after {step} {name}, under {world.process}"
        for model, its in world.models:
            assert model(X).dtype is POLICIES[its][1][1]
    for model, _ in world.models:
        hmp.remove(model)
    hmp.revert()
    assert torch_differences() == []
    now = taken_matmul, taken_tanh, taken_softmax
    assert all(one is other for one, (other,) in zip(now, ORIGINALS, strict=True)) and Taken.matmul is torch.matmul
    assert dtypes() == (F32, F32, F32)


# How others wrap a function.
FOREIGN: dict[str, Callable[[Any], Any]] = {
    "a function": lambda under: lambda *args, **kwargs: under(*args, **kwargs),
    "functools.wraps": lambda under: functools.wraps(under)(lambda *args, **kwargs: under(*args, **kwargs)),
    "functools.partial": functools.partial,
    "wrapt": lambda under: wrapt.FunctionWrapper(under, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs)),
}
UNKNOWN_DYNAMO = r"hmp does not know the torch\.compile"  # of torch 2.7, at the first convert()


@settings(max_examples=max(3, settings.default.max_examples // 4))
@given(
    before=st.sampled_from([None, *POLICIES]),
    between=st.sampled_from(sorted(POLICIES)),
    order=st.permutations(["foreign", "convert", "revert"]),
    wrap=st.sampled_from(sorted(FOREIGN)),
)
def test_p5_patches_of_others_stand(before: str | None, between: str, order: list[str], wrap: str, torch_differences: Any) -> None:
    """Put on before, between or after: they stand until who made them takes them off, and then torch is as it was."""
    hmp.revert()
    plain = torch.matmul
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, torch, "matmul", plain)
        if before:
            hmp.convert(policy=POLICIES[before][0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", UNKNOWN_DYNAMO, RuntimeWarning)
            for step in order:
                if step == "foreign":
                    torch.matmul = theirs = FOREIGN[wrap](torch.matmul)
                elif step == "convert":
                    hmp.convert(policy=POLICIES[between][0])
                    assert dtypes() == POLICIES[between][1]
                else:
                    hmp.revert()
        assert all(w.filename == __file__ for w in caught), [str(w) for w in caught]
        hmp.revert()
        assert torch.matmul is theirs and torch.matmul(X, X).dtype is F32
    hmp.revert()
    assert torch_differences() == []


def test_p5_a_warning_points_at_the_line_that_called() -> None:
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", UNKNOWN_DYNAMO, RuntimeWarning)
        hmp.convert(policy="torch-cpu")
        ours = torch.mul
        stack.callback(setattr, torch, "mul", ORIGINAL_MUL[0])
        torch.mul = lambda *args, **kwargs: ours(*args, **kwargs)
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        hmp.revert()
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]


ORIGINAL_MUL = (torch.mul,)
