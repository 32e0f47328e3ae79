"""Pickles, torch.save and spawned processes of what holds torch's functions, in every order of saving, loading, convert and revert."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import hmp
from oracle import BF16, F32
from process_kit import run_in_another_process
from trap_kit import policy, same

pytestmark = pytest.mark.searches_references

LISTS = policy(bf16=["matmul", "mm", "relu", "tanh", "gelu", "linear", "log_softmax"])
X = torch.eye(4)
HELD = {
    "Python function": lambda: F.relu,
    "builtin of functional": lambda: F.gelu,
    "builtin of torch": lambda: torch.tanh,
    "method": lambda: torch.Tensor.tanh,
    "partial of a builtin": lambda: functools.partial(torch.matmul, X),
    "partial of a Python function": lambda: functools.partial(F.log_softmax, dim=-1),
    "swapped method's owner": lambda: torch.nn.ReLU(),
}


class Model(torch.nn.Module):
    """Holds a function as users do; at the top of a module, so that pickle finds it."""

    def __init__(self, act) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.act, self.acts = torch.nn.Linear(4, 4), act, {"one": act}

    def forward(self, x):
        return self.act(self.linear(x)), self.acts["one"](x)


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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("made", WHERE)
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


def test_what_cannot_be_pickled_says_so_and_why():
    """A builtin that the patches could not reach is no longer what its name leads to; nor is a dispatcher in a tuple after revert()."""
    held = (torch._C._nn.gelu,)  # a tuple
    hmp.convert(policy=LISTS)
    with pytest.raises(pickle.PicklingError, match=r"gelu.*not the same object|not the same object.*gelu"):
        pickle.dumps(held)
    taken = (torch._C._nn.gelu,)
    assert by_pickle(taken)[0] is torch._C._nn.gelu
    hmp.revert()
    assert by_pickle(held)[0] is held[0]
    with pytest.raises(pickle.PicklingError, match=r"gelu.*not the same object|not the same object.*gelu"):
        pickle.dumps(taken)


def test_results_of_casts_are_pickled_as_plain_tensors():
    """A cast view is a tensor of a class of hmp's; a pickle of it loads where hmp is not installed."""
    with hmp.convert():
        view = torch.ones(2, 3).t()
        assert type(view) is not torch.Tensor
        written = pickle.dumps([view, torch.ones(2, 3) * 2])
    assert b"hmp" not in written
    assert [type(t) for t in pickle.loads(written)] == [torch.Tensor, torch.Tensor]
    assert [t.dtype for t in pickle.loads(written)] == [BF16, BF16]


MODELS = """
import torch, torch.nn.functional as F

class Model(torch.nn.Module):
    def __init__(self, act, other):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.act, self.others = torch.nn.Linear(4, 4), act, [other]
    def forward(self, x):
        return self.others[0](self.act(self.linear(x)))

def make():
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, activation=F.gelu, batch_first=True)
    return [Model(F.relu, torch.tanh), Model(F.gelu, F.softplus), layer, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())]
"""


@pytest.mark.slow
def test_models_go_between_processes_with_hmp_and_without(tmp_path):
    """Saved before convert(), under it and after revert(), and loaded where there is no hmp; and the other way round."""
    (tmp_path / "users_models.py").write_text(MODELS)
    path = str(tmp_path)
    run_in_another_process(
        """
        import users_models
        models = users_models.make()
        torch.save(models, sys.argv[1] + "/before.pt")
        hmp.convert()
        made_while = users_models.make()
        for each in (*models, *made_while):
            each(torch.ones(2, 1, 4) if isinstance(each, torch.nn.TransformerEncoderLayer) else torch.ones(2, 4))
        torch.save(models, sys.argv[1] + "/while.pt")
        torch.save(made_while, sys.argv[1] + "/made_while.pt")
        pickle.dump(made_while, open(sys.argv[1] + "/while.pickle", "wb"))
        hmp.revert()
        torch.save(models, sys.argv[1] + "/after.pt")
        torch.save(made_while, sys.argv[1] + "/made_while_after.pt")
        """,
        tmp_path, path=path,
    )  # fmt: skip
    run_in_another_process(
        """
        import users_models
        try:
            import hmp
        except ImportError:
            pass
        else:
            raise AssertionError("hmp is here")
        x, sequence = torch.ones(2, 4), torch.ones(2, 1, 4)
        want = None
        for name in ("before", "while", "made_while", "after", "made_while_after"):
            models = torch.load(sys.argv[1] + f"/{name}.pt", weights_only=False)
            assert models[0].act is F.relu and models[0].others[0] is torch.tanh and models[1].act is F.gelu, name
            assert models[2].activation is F.gelu, name
            got = [model(x) for model in models[:2]] + [models[2](sequence)]
            assert {t.dtype for t in got} == {torch.float32}
            want = want or got[:2]
            assert all(torch.equal(a, b) for a, b in zip(got, want)), name
        pickle.load(open(sys.argv[1] + "/while.pickle", "rb"))
        torch.save(users_models.make(), sys.argv[1] + "/without.pt")
        assert not any(name.split(".")[0] == "hmp" for name, module in sys.modules.items() if module is not None)
        """,
        tmp_path, with_hmp=False, path=path,
    )  # fmt: skip
    run_in_another_process(
        """
        import users_models
        for when in ("before", "while"):
            if when == "while":
                hmp.convert()
            models = torch.load(sys.argv[1] + "/without.pt", weights_only=False)
            hmp.convert()
            assert models[0].linear(torch.ones(2, 4)).dtype is torch.bfloat16
            assert models[1].act is F.gelu and models[2].activation is F.gelu
            hmp.revert()
            assert models[1].act is F.gelu and models[1](torch.ones(2, 4)).dtype is torch.float32
        """,
        tmp_path, path=path,
    )  # fmt: skip
