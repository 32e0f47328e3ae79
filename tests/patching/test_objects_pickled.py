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


@pytest.mark.parametrize("how", COPIES)
def test_functions_themselves_are_copied_to_themselves(how):
    functions = {"F.relu": F.relu, "F.gelu": F.gelu, "torch.tanh": torch.tanh, "torch.matmul": torch.matmul, "F.softmax": F.softmax}
    with hmp.convert(policy=LISTS):
        while_converted = {name: eval(name) for name in functions}
        for name, function in while_converted.items():
            assert COPIES[how](function) is eval(name)
    for function in functions.values():
        assert COPIES[how](function) is function


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


def test_state_dicts_are_the_same_under_casts():
    model = Model(F.gelu)
    plain = io.BytesIO()
    torch.save(model.state_dict(), plain)
    with hmp.convert(policy=LISTS):
        model(X)
        stream = io.BytesIO()
        torch.save(model.state_dict(), stream)
        assert stream.getvalue() == plain.getvalue()
        stream.seek(0)
        model.load_state_dict(torch.load(stream, weights_only=True))


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


@pytest.mark.sampled(5)
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


@pytest.mark.slow
def test_spawned_processes_are_given_models_and_functions(tmp_path):
    """A spawned process starts without casts; what it is given is whole, and torch's own."""
    (tmp_path / "users_models.py").write_text(MODELS)
    (tmp_path / "script.py").write_text(
        """
import torch, torch.nn.functional as F, multiprocessing, hmp, users_models

def work(models, functions, queue):
    own = [F.relu, torch.tanh, F.gelu]
    x = torch.ones(2, 4)
    found = [models[0](x), models[1](x), torch.mm(x, x.t())]
    queue.put(([a is b for a, b in zip(functions, own)], [str(t.dtype) for t in found], hmp.casts_enabled()))
    with hmp.convert():
        queue.put(str(models[0].linear(x).dtype))

if __name__ == "__main__":
    before = users_models.make()
    hmp.convert()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for models in (before, users_models.make()):
        process = context.Process(target=work, args=(models, [F.relu, torch.tanh, F.gelu], queue))
        process.start()
        assert queue.get(timeout=120) == ([True] * 3, ["torch.float32"] * 3, False)
        assert queue.get(timeout=120) == "torch.bfloat16"
        process.join()
        assert process.exitcode == 0
    print("done")
"""
    )
    out = run_in_another_process(
        "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')", tmp_path / "script.py", path=str(tmp_path)
    )
    assert "done" in out
