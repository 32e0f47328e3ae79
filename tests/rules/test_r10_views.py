"""R10: an op whose result is a view of its input is never cast; one that gives its input back in some calls gives a plain cast tensor."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import hmp
from hmp.cli import main
from strategies import Tagged
from trap_kit import policy, same

LOW = torch.bfloat16
DEVICE = os.environ.get("HMP_TEST_DEVICE", "cpu")

# How each op of torch that gives a view of its input is called, by its name as a method.
CALLS: dict[str, tuple[Any, ...]] = {
    "adjoint": (), "as_strided": ((2, 2), (4, 1)), "broadcast_to": ((2, 4, 4),), "chunk": (2,), "diagonal": (), "dsplit": (2,),
    "expand": (2, 4, 4), "flatten": (), "hsplit": (2,), "moveaxis": (0, 1), "movedim": (0, 1), "narrow": (0, 1, 2),
    "permute": (1, 0), "positive": (), "ravel": (), "reshape": (2, 8), "select": (0, 1), "split": (2,), "split_with_sizes": ([1, 3],),
    "squeeze": (), "swapaxes": (0, 1), "swapdims": (0, 1), "t": (), "tensor_split": (2,), "transpose": (0, 1), "unbind": (),
    "unflatten": (0, (2, 2)), "unfold": (0, 2, 1), "unsqueeze": (0,), "view": (2, 8), "vsplit": (2,), "detach": (), "conj": (),
    "view_as_complex": (), "atleast_1d": (), "atleast_2d": (), "atleast_3d": (), "broadcast_tensors": (), "meshgrid": (),
    "linalg.diagonal": (), "unsafe_chunk": (2,), "unsafe_split": (2,),
}  # fmt: skip
INPUTS = {"dsplit": (2, 2, 4), "view_as_complex": (4, 2), "meshgrid": (4,)}
# Views where they have nothing to do: they give a new tensor in the code's mind, and are cast.
SOMETIMES = {"contiguous", "resolve_conj", "resolve_neg"}
VIEW_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda y: y.add_(1),
    "zero_": lambda y: y.zero_(),
    "setitem": lambda y: y.__setitem__(0, 7.0),
    "copy_": lambda y: y.copy_(torch.ones_like(y) * 5),
    "out=": lambda y: torch.neg(torch.ones(y.shape, dtype=y.dtype), out=y),
    "to().add_": lambda y: y.to(y.dtype).add_(1),
    "data.fill_": lambda y: y.data.fill_(3),
}


def _called(name: str, x: torch.Tensor) -> list[torch.Tensor]:
    owner, _, last = name.rpartition(".")
    function = getattr(torch.linalg if owner else x if hasattr(x, last) else torch, last, None)
    result = function(*CALLS[name]) if hasattr(x, last) and not owner else function(x, *CALLS[name])
    return [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("kind", ["bf16", "fp32", "promote"])
@pytest.mark.parametrize("given", [torch.float32, LOW], ids=str)
def test_r10_a_listed_view_is_the_view_that_it_was(kind: str, given: torch.dtype) -> None:
    """The same dtype as in plain torch, and what is written through it arrives, or torch itself refuses it."""
    lists = policy(**{kind: set(CALLS)})
    for name, (what, write) in itertools.product(CALLS, VIEW_WRITES.items()):
        if name == "view_as_complex" and given is LOW:
            continue  # torch has no kernel for it (R11)
        plain, x = (torch.full(INPUTS.get(name, (4, 4)), 2.0, dtype=given) for _ in range(2))
        views = _called(name, plain)
        try:
            write(views[0])
            refused = None
        except RuntimeError as error:
            refused = str(error)
        with hmp.casts(lists):
            found = _called(name, x)
            try:
                write(found[0])
            except RuntimeError as error:
                assert str(error) == refused, (name, what)
        assert [(t.dtype, t.shape, type(t)) for t in found] == [(t.dtype, t.shape, type(t)) for t in views], name
        assert torch.equal(x, plain), f"{what} after {name} did not arrive"
        if DEVICE != "xla":  # where each view has memory of its own
            assert {t.untyped_storage()._cdata for t in found} == {x.untyped_storage()._cdata}, name


def test_r10_every_view_of_torch_is_called_above() -> None:
    """The names whose ATen schema returns an alias of its input, public methods that compute nothing."""
    schemas = torch._C._jit_get_all_schemas()
    aliasing = {
        s.name.removeprefix("aten::")
        for s in schemas
        if s.name.startswith("aten::")
        and s.arguments
        and any(a.alias_info is not None and not a.alias_info.is_write for a in s.arguments)
        and any(r.alias_info is not None for r in s.returns)
    }
    public = {n for n in aliasing if not n.startswith("_") and hasattr(torch.Tensor, n) and not n.endswith("_")}
    other_dtype = {"imag", "view_as_real", "to", "cpu", "cuda", "data", "expand_as", "view_as", "reshape_as"}  # complex, or R7's
    properties = {"mH", "mT", "real"}  # no list reaches these
    named_dimensions = {"rename", "align_to", "refine_names"}  # gone from later releases
    sparse = {"coalesce", "indices", "values", "ccol_indices", "col_indices", "crow_indices", "row_indices"}
    assert public - set(CALLS) - SOMETIMES - {"pin_memory", "slice_inverse"} - other_dtype - sparse - properties - named_dimensions == set()


def test_r10_the_views_of_a_sparse_tensor_are_not_cast() -> None:
    sparse = torch.eye(3).to_sparse()
    with hmp.casts(policy(bf16=["values", "indices", "coalesce"])):
        values = sparse.values()
        values.add_(1)
        assert values.dtype is torch.float32 and sparse.indices().dtype is torch.int64
        assert sparse.coalesce().dtype is LOW  # it sums, and gives its input back where there is nothing to sum
    assert sparse.to_dense().diagonal().tolist() == [2, 2, 2]


def test_r10_a_view_of_a_subclass_is_its_view() -> None:
    with hmp.casts(policy(bf16=CALLS.keys())):
        for x in (torch.zeros(2, 2).as_subclass(Tagged), TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2))):
            view = x.t()
            view.fill_(1)
            assert type(view) is type(x) and float(getattr(x, "a", x)[0, 0]) == 1


def test_r10_state_takes_a_listed_view() -> None:
    module, w = nn.Module(), torch.randn(3, 3)
    module.register_buffer("buffer", torch.zeros(3, 3))
    p = nn.Parameter(torch.zeros(3, 3))
    with hmp.casts("habana"):
        p.data, module.buffer, p.grad, parameter = w.t(), w.view(3, 3), w.t().t(), nn.Parameter(w.t())
    for held in (p.data, module.buffer, p.grad, parameter):
        assert held.dtype is torch.float32 and held.data_ptr() == w.data_ptr()


# Where these have nothing to do they give back their input itself, as a function and, where there is one, as a module in eval.
NOTHING_TO_DO: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
    "dropout": [
        lambda x: F.dropout(x, 0.5, False), lambda x: F.dropout(x, p=0.0), lambda x: torch.dropout(x, 0.5, False), nn.Dropout().eval(),
        lambda x: torch.dropout(x, 0.0, True),
    ],
    "dropout1d": [lambda x: F.dropout1d(x, 0.5, False), nn.Dropout1d(0.0)],
    "dropout2d": [lambda x: F.dropout2d(x[None], 0.5, False)[0], nn.Dropout2d().eval()],
    "dropout3d": [lambda x: F.dropout3d(x[None, None], training=False)[0, 0], lambda x: nn.Dropout3d().eval()(x[None])[0]],
    "alpha_dropout": [lambda x: F.alpha_dropout(x, 0.5), lambda x: torch.alpha_dropout(x, 0.5, False), nn.AlphaDropout().eval()],
    "feature_dropout": [lambda x: torch.feature_dropout(x, 0.5, False)],
    "feature_alpha_dropout": [lambda x: torch.feature_alpha_dropout(x, 0.5, False), nn.FeatureAlphaDropout().eval()],
    "sum_to_size": [lambda x: x.sum_to_size(x.shape)],
    "to_dense": [lambda x: x.to_dense()],
    "contiguous": [lambda x: x.contiguous()],
    "resolve_conj": [lambda x: x.resolve_conj()],
    "resolve_neg": [lambda x: x.resolve_neg()],
    "einsum": [lambda x: torch.einsum("ijk->kij", x)],
    "cartesian_prod": [lambda x: torch.cartesian_prod(x[0, 0])],
    "conj_physical": [lambda x: torch.conj_physical(x)],
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize(("cast", "given", "wanted"), [("bf16", torch.float32, LOW), ("fp32", LOW, torch.float32)], ids=["bf16", "fp32"])
def test_r10_what_gives_back_its_input_gives_a_plain_tensor(cast: str, given: torch.dtype, wanted: torch.dtype, grad: bool) -> None:
    with hmp.convert(policy=hmp.Policy("mine", **{cast: set(NOTHING_TO_DO)})):
        for name, calls in NOTHING_TO_DO.items():
            for call, (what, write) in itertools.product(calls, VIEW_WRITES.items()):
                if grad and what == "out=":
                    continue  # it takes no part in autograd
                x = torch.full((3, 4, 4), 2.0, dtype=given, requires_grad=grad)
                with hmp.disable_casts():
                    expected = call(x.detach().to(wanted).clone())
                    write(expected)
                result = call(x)
                assert type(result) is torch.Tensor and result.dtype is wanted, name
                write(result)
                same(result, expected)
                with hmp.disable_casts():
                    assert (x == 2).all(), f"{name} wrote into its input"


def test_r10_what_torch_refuses_of_a_view_is_mended_as_for_an_unlisted_op() -> None:
    """A mixture (R7), and a kernel that is missing (R11): plain torch raises for both, so nobody relies on a view there."""
    one, two = torch.randn(3), torch.randn(2)
    low = torch.randn(3, 2).to(LOW)
    for kind in ("bf16", "fp32", "promote"):
        with hmp.casts(policy(**{kind: ["meshgrid", "view_as_complex"]})):
            a, b = torch.meshgrid(one.to(LOW), two, indexing="ij")
            seen = torch.view_as_complex(low)
        want = torch.meshgrid(one.to(LOW), two.to(LOW), indexing="ij")
        same(a, want[0])
        same(b, want[1])
        same(seen, torch.view_as_complex(low.float()))


def test_r10_check_and_explain_say_that_nothing_is_cast(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bf16.txt").write_text("t\nlinear\nview_as_complex\nlinalg.diagonal @ encoder\n")
    (tmp_path / "fp32.txt").write_text("meshgrid\n")
    assert main(["check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for line in out.splitlines():
        assert (
            any(name in line for name in ("linear", "findings", "no promote", "scopes were not checked"))
            or "a view: nothing is computed, so nothing is cast" in line
        )
    assert "note" in out.splitlines()[0]
    for name in ("t", "transpose", "view_as_complex", "linalg.diagonal", "meshgrid"):
        for kind in ("bf16", "fp32", None):
            told = hmp.explain(name, policy(**{kind: [name]} if kind else {}))
            assert told.cast == kind and told.why.startswith("a view: nothing is computed, so nothing is cast (R10)")
    assert "any device in bfloat16" in hmp.explain("view_as_complex", "habana").why


def test_r10_a_view_under_every_op_on_the_list_stays_a_view() -> None:
    for kind, given in (("bf16", torch.float32), ("fp32", LOW)):
        x = torch.zeros(2, 3, dtype=given)
        with hmp.casts(policy(**{kind: ["*"]})):
            for view in (x.t(), x.view(-1), x.contiguous(), x.chunk(2)[0], x.detach()):
                view.add_(1)
        assert x.dtype is given and x[0].tolist() == [5, 5, 5] and x[1].tolist() == [4, 4, 4]


@pytest.mark.parametrize("view", ["t", "view_as_complex"])
def test_r10_compiled_code_has_the_same_views(view: str, fresh_compiler: None) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        y = getattr(torch, view)(x)
        y.mul_(2)
        return x, y.dtype

    x = torch.ones(3, 2)
    with hmp.casts(policy(bf16=["t", "view_as_complex", "mul"])):
        found, dtype = torch.compile(step, backend="eager", fullgraph=True)(x)
    assert dtype is (torch.float32 if view == "t" else torch.complex64) and (x == 2).all() and (found == 2).all()
