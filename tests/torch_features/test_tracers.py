"""torch.export (not strict), make_fx, fx.symbolic_trace and torch.jit.trace of a model whose casts are on: the casts are in what they give.

Where torch refuses an op, torch.jit.trace raises torch's error. torch.jit.script compiles code without casts.
"""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

import hmp
from compile_kit import BRIDGED
from oracle import BF16, F32
from trap_kit import policy, same

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
LISTS = policy(bf16=["linear", "matmul", "mm", "layer_norm", "relu", "t", "linalg.inv"], fp32=["softmax"])


OTHER = policy(fp32=["linear", "matmul", "relu", "layer_norm"], bf16=["softmax"])


class Model(torch.nn.Module):
    """Functions, methods, operators, a module, and a region without casts."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = torch.nn.Linear(width, width), torch.nn.LayerNorm(width)

    def forward(self, x):
        hidden = self.norm(self.linear(x))
        scores = torch.softmax(hidden @ hidden.t(), -1)
        with hmp.disable_casts():
            wide = x.matmul(x.t())
        return hidden, scores, wide, x.matmul(x.t()), x.relu(), F.relu(x * 1)


def by_hand(model, x):
    """What `Model` gives under LISTS, in plain torch."""
    low, linear, norm = x.to(BF16), model.linear, model.norm
    hidden = F.layer_norm(F.linear(low, linear.weight.to(BF16), linear.bias.to(BF16)), linear.bias.shape, norm.weight, norm.bias)
    scores = torch.softmax((hidden @ hidden.t()).to(F32), -1)
    return hidden, scores, x.matmul(x.t()), low.matmul(low.t()), low.relu(), F.relu(low)


def assert_casts(got, model, x=X):
    with hmp.disable_casts():
        want = by_hand(model, x)
    assert [t.dtype for t in got] == [BF16, F32, F32, BF16, BF16, BF16]
    same(list(got), list(want))


SCOPES = {
    "convert": lambda make, model: _under(hmp.convert(policy=LISTS), make, model),
    "casts": lambda make, model: _under(hmp.casts(LISTS), make, model),
    "apply": lambda make, model: make(hmp.apply(model, LISTS)),
}


def _under(scope, make, model):
    with scope:
        return make(model)


def export(model, **more):
    return torch.export.export(model, (X,), strict=False, **more).module()


def fx_of(model, mode="real", **more):
    return make_fx(lambda x: model(x), tracing_mode=mode, _allow_non_fake_inputs=True, **more)(X)


GRAPHS = {
    "export": export,
    "export, dynamic": lambda model: export(model, dynamic_shapes={"x": {0: torch.export.Dim("rows")}}),
    "export, decomposed": lambda model: torch.export.export(model, (X,), strict=False).run_decompositions().module(),
    "export, strict": lambda model: torch.export.export(model, (X,), strict=True).run_decompositions().module(),
    "make_fx": fx_of,
    "make_fx, symbolic": lambda model: fx_of(model, "symbolic"),
    "make_fx, decomposed": lambda model: fx_of(model, "fake", decomposition_table=core_aten_decompositions()),
}
SELDOM = {"export, dynamic": "casts", "export, strict": "casts", "export, decomposed": "convert"}
SELDOM |= {"make_fx, symbolic": "apply", "make_fx, decomposed": "casts", "make_fx": "convert"}


@pytest.mark.parametrize(
    ("name", "scope"), [("export", "apply"), *(pytest.param(*each, marks=[BRIDGED, pytest.mark.slow]) for each in SELDOM.items())]
)
def test_casts_are_in_the_graph_whatever_is_in_force_where_it_runs(name, scope):
    model = Model()
    with hmp.convert(policy=LISTS), hmp.disable_casts():
        without = GRAPHS[name](model)
    graph = SCOPES[scope](GRAPHS[name], model)
    hmp.remove(model)
    for around in (contextlib.nullcontext(), hmp.casts(OTHER), hmp.disable_casts()):
        with hmp.convert(), around:
            assert_casts(graph(X), model)
            assert {t.dtype for t in without(X)} == {F32}  # a graph made without casts has none
    hmp.revert()
    assert_casts(graph(X), model)


@pytest.mark.native_kernels
@pytest.mark.slow
def test_an_exported_graph_takes_any_size_is_saved_and_loaded_and_trains(tmp_path):
    model, rows = Model(), torch.randn(300, 16)
    with hmp.casts(LISTS):
        program = torch.export.export(model, (X,), strict=False, dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    torch.export.save(program, tmp_path / "program.pt2")
    hmp.revert()
    for each in (program, torch.export.load(tmp_path / "program.pt2")):
        assert_casts(each.module()(rows), model, rows)
    graph = program.module()
    sum(t.float().square().sum() for t in graph(X)).backward()
    want = torch.autograd.grad(sum(t.float().square().sum() for t in by_hand(model, X)), list(model.parameters()))
    same([parameter.grad for parameter in graph.parameters()], list(want))


# --- fx.symbolic_trace: no tensors, so its graph calls torch's functions as the model does


class Traced(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden, hidden @ hidden.t(), torch.softmax(hidden, -1), F.relu(x), x.relu(), 2.0 * x, torch.nn.functional.gelu(x)


TRACED_LISTS = policy(bf16=["linear", "matmul", "relu", "mul", "gelu", "t"], fp32=["softmax"])
TRACED_DTYPES = [BF16, BF16, F32, BF16, BF16, BF16, BF16]


@pytest.mark.parametrize("when", ["before", "without casts"])
def test_a_symbolic_trace_casts_as_its_model_does_and_so_do_its_copies(when, monkeypatch):
    # loading a GraphModule leaves its forward there
    monkeypatch.setattr(torch.fx.graph_module._CodeOnlyModule, "forward", None, raising=False)
    model = Traced()
    if when == "before":
        graph = torch.fx.symbolic_trace(model)
    hmp.convert(policy=TRACED_LISTS)
    if when == "without casts":
        with hmp.disable_casts():
            graph = torch.fx.symbolic_trace(model)
    for each in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), torch.fx.Transformer(graph).transform()):
        got = each(X)
        assert [t.dtype for t in got] == TRACED_DTYPES
        same(list(got), list(model(X)))
        with hmp.disable_casts():
            assert {t.dtype for t in each(X)} == {F32}
    got = torch.fx.Interpreter(graph).run(X)
    assert [t.dtype for t in got] == TRACED_DTYPES
    hmp.revert()
    assert {t.dtype for t in graph(X)} == {F32}


# --- torch.jit


INVERTIBLE = torch.randn(4, 4, generator=torch.Generator().manual_seed(5)) + 4 * torch.eye(4)


@pytest.mark.native_kernels
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("width", [4, 96], ids=["small", "of a size that is shared"])
def test_a_trace_holds_the_casts_also_when_it_is_saved_and_loaded(width, tmp_path):
    model, x = Model(width), torch.randn(width, width)
    with hmp.casts(LISTS):
        traced = torch.jit.trace(model, (x,))  # torch checks it: traces the model again, without gradients
    traced.save(tmp_path / "traced.pt")
    hmp.revert()
    for scope in (hmp.casts(policy(fp32=["*"])), hmp.casts(LISTS), contextlib.nullcontext()):
        with scope:
            results = traced(x), torch.jit.load(tmp_path / "traced.pt")(x)
        for got in results:
            assert_casts(got, model, x)


def traced_inverse(x):
    return torch.relu(torch.linalg.inv(torch.relu(x).float())).float()


def test_a_trace_holds_the_float32_call_of_an_op_that_is_known_to_have_no_kernel():
    with hmp.casts(LISTS):
        same(
            torch.jit.trace(traced_inverse, (INVERTIBLE,))(INVERTIBLE),
            torch.linalg.inv(INVERTIBLE.to(BF16).relu().float()).to(BF16).relu().float(),
        )


REFUSED = {
    "a missing kernel": (lambda x: torch.mm(x.to_sparse_csr(), x), "BFloat16"),
    "a mixture": (lambda x: torch.inner(x.bfloat16(), x), "dtype"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_trace_of_an_op_that_torch_refuses_raises_torchs_error(name):
    """The error ends torch's trace: to call the op again would crash the interpreter."""
    function, error = REFUSED[name]
    hmp.revert()  # forgets what calls of other tests have shown
    with hmp.casts(LISTS):
        with pytest.raises(RuntimeError, match=error):
            torch.jit.trace(lambda x: torch.relu(function(torch.relu(x).float())), (INVERTIBLE.clone(),))
        assert torch._C._get_tracing_state() is None
        assert function(INVERTIBLE.clone()).shape == INVERTIBLE.shape


def scripted(x):
    return torch.softmax(F.linear(x, x) @ x.t(), -1), F.relu(x), x.relu(), torch.mul(x, 2), F.gelu(x)


def test_scripted_code_has_no_casts():
    want = scripted(INVERTIBLE)
    with hmp.convert():
        compiled = torch.jit.script(scripted)
        under = compiled(INVERTIBLE)
    for got in (under, compiled(INVERTIBLE)):
        same(list(got), list(want))
