"""Names that took a function of torch before convert() cast too, and are restored; references that are held elsewhere are listed."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
import wrapt

import hmp
from oracle import BF16, F32
from process_kit import run_in_another_process
from trap_kit import policy

pytestmark = pytest.mark.usefixtures("libraries_are_searched")

NUMBERS = itertools.count()
LISTS = policy(bf16=["matmul", "mm", "relu", "tanh", "sigmoid", "gelu", "linear", "softmax", "normalize"])
X = torch.eye(4)

SOURCE = """
import functools
import torch
import torch.nn.functional as F
from torch import matmul, relu as rectified
from torch.nn.functional import linear, normalize, softmax, gelu
from torch.nn.utils import clip_grad_norm_
ACT2FN = {"tanh": torch.tanh, "gelu": F.gelu, "relu": F.relu, "normalize": F.normalize}
STAGES = [torch.tanh, torch.sigmoid]
TUPLE = (torch.tanh, 1)
SET = {torch.tanh}
KEYS = {torch.tanh: "tanh"}
NESTED = {"a": [(torch.sigmoid,)]}
INIT = {"xavier": torch.nn.init.xavier_uniform_}
class Acts:
    plain = torch.tanh
    static = staticmethod(torch.tanh)
    normal = staticmethod(F.normalize)
    table = {"tanh": torch.tanh}
def default(x, act=torch.tanh, *, other=torch.sigmoid):
    return act(x), other(x)
halved = functools.partial(F.normalize, dim=0)
def making(act):
    def made(x):
        return act(x)
    return made
closed = making(torch.tanh)
class Module(torch.nn.Module):
    def __init__(self, act=torch.tanh):
        super().__init__()
        self.act, self.acts = act, [torch.tanh]
    def forward(self, x):
        return self.act(x), self.acts[0](x)
model = Module()
"""

REACHED = {
    "from torch import": lambda m: m.matmul(X, X),
    "import as": lambda m: m.rectified(X),
    "from functional import, builtin": lambda m: m.linear(X, X),
    "from functional import, builtin gelu": lambda m: m.gelu(X),
    "from functional import, Python": lambda m: m.softmax(X, -1),
    "from functional import, an op in Python": lambda m: m.normalize(X),
    "static method, an op in Python": lambda m: m.Acts().normal(X),
    "class attribute of an object": lambda m: m.Acts().plain(X),
    "class attribute": lambda m: m.Acts.plain(X),
    "static method": lambda m: m.Acts().static(X),
    "module's attribute": lambda m: m.model(X)[0],
}
LEFT = {
    "table": lambda m: m.ACT2FN["tanh"](X),
    "table, an op in Python": lambda m: m.ACT2FN["normalize"](X),
    "list": lambda m: m.STAGES[1](X),
    "table in a class": lambda m: m.Acts.table["tanh"](X),
    "partial": lambda m: m.halved(X),
    "module's list": lambda m: m.model(X)[1],
}


@pytest.fixture
def users(tmp_path, monkeypatch):
    """A module of a user's, imported before convert()."""
    hmp.revert()
    name = f"users_own_{next(NUMBERS)}"  # classes of a module that was dropped may be alive still
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    hmp.revert()
    del sys.modules[name]


def holds(value):
    """What a module, a class and an nn.Module hold, by identity."""
    found = {name: id(getattr(each, "__func__", each)) for name, each in vars(value).items() if name != "__builtins__"}
    inside = [each for each in vars(value).values() if getattr(each, "__module__", "") == getattr(value, "__name__", None)]
    return found, [holds(each) for each in inside if isinstance(each, (type, torch.nn.Module))]


def test_names_taken_before_convert_cast_and_are_given_back(users):
    before = holds(users)
    assert {name: call(users).dtype for name, call in REACHED.items()} == dict.fromkeys(REACHED, F32)
    for _ in range(2):
        with hmp.convert(policy=LISTS):
            assert {name: call(users).dtype for name, call in REACHED.items()} == dict.fromkeys(REACHED, BF16)
            assert {name: call(users).dtype for name, call in LEFT.items()} == dict.fromkeys(LEFT, F32)
            with hmp.disable_casts():
                assert {call(users).dtype for call in REACHED.values()} == {F32}
        assert {call(users).dtype for call in REACHED.values()} == {F32}
        assert holds(users) == before
    with hmp.casts(LISTS):
        assert {call(users).dtype for call in REACHED.values()} == {BF16}
    hmp.revert()
    assert holds(users) == before


def test_a_name_of_a_librarys_proxy_in_the_place_of_an_op_casts_too(users, monkeypatch):
    proxy = wrapt.FunctionWrapper(F.gelu, lambda own, instance, args, kwargs: own(*args, **kwargs))
    monkeypatch.setattr(F, "gelu", proxy)
    monkeypatch.setattr(users, "gelu", proxy)
    with hmp.convert(policy=LISTS):
        assert users.gelu(X).dtype is BF16


def test_r15_a_function_that_is_no_op_is_followed_by_name(users):
    weight = torch.nn.Parameter(torch.full((3,), 1000.0))
    plain = users.clip_grad_norm_
    grad = torch.tensor([1.0, 2.0, 3.0]) / 3
    weight.grad = grad.clone()
    want = plain([weight], 0.5), weight.grad.clone()
    for _ in range(2):
        with hmp.convert(policy=policy(bf16=["linalg.vector_norm", "mul", "mul_", "div", "stack", "clamp", "add"])):
            weight.grad = grad.clone()
            norm = users.clip_grad_norm_([weight], 0.5)
            assert users.clip_grad_norm_ is torch.nn.utils.clip_grad_norm_
            assert torch.equal(norm, want[0]) and torch.equal(weight.grad, want[1])
        assert users.clip_grad_norm_ is plain


# --- names taken while torch is patched


def test_names_taken_while_converted_do_what_torchs_own_functions_do():
    table, listed, keys, names = {}, [], {}, {torch.tanh}
    with hmp.convert(policy=LISTS):
        table["tanh"], keys[torch.tanh], closed = torch.tanh, 1, functools.partial(torch.tanh)
        listed.append(F.gelu)
        names.add(torch.matmul)

        class Model(torch.nn.Module):
            act = torch.tanh
            static = staticmethod(torch.tanh)

            def __init__(self, act=torch.tanh):
                super().__init__()
                self.act2 = act

            def forward(self, x):
                return self.act(x), self.act2(x), self.static(x)

        class Plain:
            act = staticmethod(torch.tanh)

        model = Model()
        assert [t.dtype for t in model(X)] == [BF16] * 3  # a class attribute takes no self, as the builtin does not
        assert closed(X).dtype is BF16
    assert table["tanh"] == torch.tanh and listed[0] == F.gelu and list(keys) == [torch.tanh] and names == {torch.tanh, torch.matmul}
    assert [f(X).dtype for f in (table["tanh"], listed[0], *keys, Plain.act, closed)] == [F32] * 5
    assert model.act2 is torch.tanh and Model.__init__.__defaults__ == (torch.tanh,)
    assert Model.act is Model.static is torch.tanh
    assert vars(Model)["act"] is torch.tanh and type(vars(Model)["static"]) is staticmethod  # each as the class's own code has it
    assert [t.dtype for t in model(X)] == [F32] * 3


# --- what cannot be reached


@pytest.mark.slow
def test_unreachable_lists_module_name_and_line(tmp_path):
    """In a process of its own: pytest's and these tests' tables of torch's functions are users' references too."""
    (tmp_path / "users_own.py").write_text(SOURCE)
    lines = SOURCE.split("\n")

    def line_of(start):
        return next(i for i, line in enumerate(lines, 1) if line.startswith(start))

    want = [
        *(("users_own", name, line_of(name), "torch.tanh") for name in ("TUPLE", "SET", "KEYS", "ACT2FN", "STAGES")),
        ("users_own", "ACT2FN", line_of("ACT2FN"), "torch._C._nn.gelu"),
        *(("users_own", name, line_of(name), "torch.sigmoid") for name in ("NESTED", "STAGES")),
        ("users_own", "INIT", line_of("INIT"), "torch.nn.init.xavier_uniform_"),
        ("users_own", "default, a default argument", line_of("def default"), "torch.tanh"),
        ("users_own", "default, a default argument", line_of("def default"), "torch.sigmoid"),
        ("users_own", "making.<locals>.made, a closure", line_of("def making") + 1, "torch.tanh"),
        ("users_own", "Module.__init__, a default argument", line_of("    def __init__(self, act=torch.tanh)"), "torch.tanh"),
    ]
    run_in_another_process(
        f"""
        import users_own
        assert hmp.unreachable() == []  # nothing is patched
        with hmp.convert(policy="torch-cpu"):
            assert {{each.op for each in hmp.unreachable()}} == {{"torch.nn.init.xavier_uniform_"}}  # the policy leaves the others alone
        hmp.revert()
        lists = dict(bf16=frozenset(["tanh", "sigmoid", "matmul", "relu", "linear", "gelu"]), fp32=frozenset(), promote=frozenset())
        policy = hmp.Policy(name="low", dtype=torch.bfloat16, **lists)
        with hmp.convert(policy=policy):
            assert sorted(map(tuple, hmp.unreachable())) == sorted({want!r}), hmp.unreachable()
            x = torch.ones(2)
            held = users_own.TUPLE[0], users_own.closed
            assert {{each(x).dtype for each in held}} == {{torch.float32}}
            assert "users_own:{line_of("TUPLE")}: TUPLE holds torch.tanh from before hmp patched it" in map(str, hmp.unreachable())
        assert hmp.unreachable() == []
        """,
        path=str(tmp_path),
    )
