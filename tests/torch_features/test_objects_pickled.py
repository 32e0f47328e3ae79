"""Pickles, copies and torch.save of what holds torch's functions, in every order of saving, loading, convert and revert."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F

import hmp
from oracle import BF16, F32
from trap_kit import policy, same

LISTS = policy(bf16=["matmul", "mm", "relu", "tanh", "gelu", "linear", "log_softmax"])
X = torch.eye(4)
HELD = {
    "Python function": lambda: F.relu,
    "builtin of functional": lambda: F.gelu,
    "builtin of torch": lambda: torch.tanh,
    "method": lambda: torch.Tensor.tanh,
    "swapped method's owner": lambda: torch.nn.ReLU(),
}


class Model(torch.nn.Module):
    """Holds a function as users do; at the top of a module, so that pickle finds it."""

    def __init__(self, act) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.act = torch.nn.Linear(4, 4), act

    def forward(self, x):
        return self.act(self.linear(x)), self.act(x)


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


def by_torch_save(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES = {"pickle": by_pickle, "torch.save": by_torch_save, "deepcopy": copy.deepcopy, "copy": copy.copy}
WHERE = ["before", "while", "after"]


def dtypes(model):
    return [t.dtype for t in model(X)]


@pytest.mark.parametrize(
    ("made", "name", "how"),
    [
        ("before", "builtin of torch", "pickle"),
        pytest.param("while", "method", "torch.save", marks=pytest.mark.slow),
        pytest.param("after", "Python function", "deepcopy", marks=pytest.mark.slow),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in itertools.product(WHERE, HELD, COPIES)),
    ],
)
def test_a_model_that_holds_a_function_is_copied_at_any_time(made, name, how):
    """Made before convert(), under it and after revert(); copied before, under it and after."""
    copied, make = [], HELD[name]
    if made == "before":
        model = Model(make())
        copied.append(COPIES[how](model))
    hmp.convert(policy=LISTS)
    if made == "while":
        model = Model(make())
    if made in ("before", "while"):
        copied.append(COPIES[how](model))
        for each in (model, *copied[1:]):
            assert dtypes(each) == [BF16, BF16]
            assert b"hmp" not in pickle.dumps(each)  # it loads where there is no hmp
    if made == "before":
        assert dtypes(copied[0]) == [BF16, BF16]
    hmp.revert()
    if made == "after":
        model = Model(make())
    copied.append(COPIES[how](model))
    want = model(X)
    for each in (model, *copied):
        assert dtypes(each) == [F32, F32]
        for one, other in zip(each(X), want, strict=True):
            same(one, other)
        assert by_pickle(each)(X)[0].dtype is F32
    hmp.convert(policy=LISTS)
    for each in (model, *copied):
        assert dtypes(each) == [BF16, BF16]


def test_an_applied_model_takes_its_policy_into_a_deep_copy_and_not_into_a_pickle():
    model = hmp.apply(Model(F.gelu), LISTS)
    assert dtypes(copy.deepcopy(model)) == [BF16, BF16]
    assert dtypes(by_pickle(model)) == [F32, F32]
    assert dtypes(by_torch_save(model)) == [F32, F32]


@pytest.mark.usefixtures("unpatched")
def test_what_cannot_be_pickled_says_so_and_why():
    """A builtin that the patches could not reach is no longer what its name leads to."""
    held = (torch._C._nn.gelu,)  # a tuple
    hmp.convert(policy=LISTS)
    with pytest.raises(pickle.PicklingError, match=r"gelu.*not the same object|not the same object.*gelu"):
        pickle.dumps(held)
    taken = (torch._C._nn.gelu,)
    assert by_pickle(taken)[0] is torch._C._nn.gelu
    hmp.revert()
    assert by_pickle(held)[0] is held[0]
    assert by_pickle(taken)[0] is torch._C._nn.gelu  # what was taken while torch was patched leads there by its name
