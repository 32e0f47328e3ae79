"""R10: a cast turns a view into a copy, and a write that would be lost in that copy is refused, with the remedy, whichever op made it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import hmp
from trap_kit import refused, same

LOW = torch.bfloat16
ROW = torch.tensor([5.0, 5.0])

# One of each way in which a call may name what it writes; P2 draws more of the plain ones.
WRITES = {
    "add_": lambda y: y.add_(1),
    "copy_": lambda y: y.copy_(torch.ones(3, 2)),
    "uniform_": lambda y: y.uniform_(),
    "clamp_": lambda y: y.clamp_(min=1),
    "index_put_": lambda y: y.index_put_((torch.tensor([0]),), ROW),
    "masked_scatter_": lambda y: y.masked_scatter_(torch.ones(3, 2, dtype=torch.bool), torch.ones(6)),
    "torch.sin_": lambda y: torch.sin_(y),
    "torch.fill_": lambda y: torch.fill_(y, 1.0),
    "F.relu inplace": lambda y: F.relu(y, inplace=True),
    "F.dropout positional": lambda y: F.dropout(y, 0.5, True, True),
    "F.leaky_relu_": lambda y: F.leaky_relu_(y),
    "nn.ReLU inplace": lambda y: torch.nn.ReLU(inplace=True)(y),
    "nn.init": lambda y: torch.nn.init.ones_(y),
    "+=": lambda y: y.__iadd__(1),
    "//=": lambda y: y.__ifloordiv__(2),
    "**=": lambda y: y.__ipow__(2),
    "y[mask] = 1": lambda y: y.__setitem__(torch.ones(3, 2, dtype=torch.bool), 1.0),
    "y[0] += 1": lambda y: exec("y[0] += 1", {"y": y}),
    "y[0][1] = 1": lambda y: y[0].__setitem__(1, 1.0),
    "y.T.add_": lambda y: y.T.add_(1),
    "y.detach().add_": lambda y: y.detach().add_(1),
    "y.data.add_": lambda y: y.data.add_(1),
    "y.unbind()": lambda y: y.unbind()[1].zero_(),
    "y.view": lambda y: y.transpose(0, 1).view(-1).zero_(),
    "out= of a listed op": lambda y: torch.mm(torch.ones(3, 2), torch.ones(2, 2), out=y),
    "out= of an unlisted op": lambda y: torch.sin(torch.ones(3, 2), out=y),
    "out= a view": lambda y: torch.sin(torch.ones(2), out=y[0]),
    "out= a tuple": lambda y: torch.max(torch.ones(3, 2, 4), 2, out=(y, torch.zeros(3, 2, dtype=torch.int64))),
    "_foreach_zero_": lambda y: torch._foreach_zero_([torch.ones(2), y]),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_r10_a_write_into_a_cast_copy_of_a_view_is_refused(grad):
    lost = []
    with hmp.casts("habana"), torch.set_grad_enabled(grad):
        for name, write in WRITES.items():
            x = torch.arange(6.0).reshape(2, 3)
            y = x.t()
            assert y.dtype == LOW
            before = y.clone()
            try:
                refused(lambda write=write, y=y: write(y))
                same(y, before)
                same(x, torch.arange(6.0).reshape(2, 3))
            except AssertionError as error:
                lost.append(f"{name}: {error}")
    assert not lost


def test_r10_real_copies_of_the_copy_and_results_that_are_no_views_may_be_written():
    x = torch.zeros(2, 3)
    with hmp.casts("habana"):
        y = x.t()
        for mine in (
            *(y.clone(), y.contiguous(), y + 0, torch.relu(y), y.reshape(-1), copy.deepcopy(y), torch.empty_like(y), y.float()),
            *(torch.cat([y, y]), torch.relu(x), x * 2, F.dropout(x, 0.5), F.layer_norm(x, (3,)), torch.mm(x, x.T)),
        ):
            mine.add_(1)
            mine[0] = 2
            mine *= 2
    assert (x == 0).all() and (y == 0).all()


def test_r10_a_tensor_in_the_place_of_a_dead_copy_may_be_written():
    x = torch.zeros(2, 3)
    with hmp.casts("habana"):
        for _ in range(200):
            y = x.t()
            del y
            torch.zeros(3, 2, dtype=LOW).add_(1)


def test_r10_changing_the_metadata_of_the_copy_is_no_write():
    changes = {"t_": (), "squeeze_": (), "transpose_": (0, 1), "unsqueeze_": (0,), "requires_grad_": ()}
    for change, arguments in changes.items():
        with hmp.casts("habana"):
            x = torch.zeros(2, 3)
            y = x.t()
            getattr(y, change)(*arguments)
            refused(lambda y=y: y.detach().add_(1))
        expected = torch.zeros(2, 3).t()
        getattr(expected, change)(*arguments)
        assert y.shape == expected.shape and y.requires_grad == expected.requires_grad


def test_r10_views_under_other_names_refuse_and_what_is_no_view_does_not():
    x = torch.zeros(3, 3)
    for listed, view in (
        ("diagonal", lambda: torch.linalg.diagonal(x)),
        ("einsum", lambda: torch.einsum("ij->ji", x)),
        ("unfold", lambda: x.unfold(0, 2, 1)),
        ("cartesian_prod", lambda: torch.cartesian_prod(x[0])),
        ("conj_physical", lambda: torch.conj_physical(x)),
    ):
        with hmp.casts(hmp.Policy(bf16={listed})), pytest.raises(hmp.HmpError, match="be lost"):
            view().add_(1)
    assert x.sum() == 0
    for listed, fresh in (
        ("einsum", lambda: torch.einsum("ij,jk->ik", x, x)),
        ("unfold", lambda: torch.nn.functional.unfold(x[None, None], 2)),
    ):
        with hmp.casts(hmp.Policy(bf16={listed})):
            assert fresh().add_(1).dtype == torch.bfloat16


def test_r10_dropout_in_eval_may_be_written_to_where_nobody_has_its_input():
    """Residual code writes into what dropout gave; in plain torch the write is seen in x too, if anybody still has x."""
    x, base, array = torch.ones(3), torch.ones(2, 3), np.ones(3, "float32")
    with hmp.casts("habana"):
        y = F.dropout(x.clone(), 0.5, training=False)
        y += 1
        y[0] = 5
        for kept in (x, base[0], torch.from_numpy(array)):
            with pytest.raises(hmp.HmpError, match="take 'dropout' off the list"):
                F.dropout(kept, 0.5, training=False).__iadd__(1)
        for fill in (torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.kaiming_uniform_):
            with pytest.raises(hmp.HmpError, match="take 'dropout' off the list"):
                fill(F.dropout(base, 0.5, training=False))
    assert y.tolist() == [5.0, 2.0, 2.0] and y.dtype is LOW
    assert (x == 1).all() and (base == 1).all()


# How each op of torch that gives a view of its input is called, by its name as a method.
CALLS: dict[str, tuple[Any, ...]] = {
    "adjoint": (), "as_strided": ((2, 2), (4, 1)), "broadcast_to": ((2, 4, 4),), "chunk": (2,), "diagonal": (), "dsplit": (2,),
    "expand": (2, 4, 4), "flatten": (), "hsplit": (2,), "moveaxis": (0, 1), "movedim": (0, 1), "narrow": (0, 1, 2),
    "permute": (1, 0), "positive": (), "ravel": (), "reshape": (2, 8), "select": (0, 1), "split": (2,), "split_with_sizes": ([1, 3],),
    "squeeze": (), "swapaxes": (0, 1), "swapdims": (0, 1), "t": (), "tensor_split": (2,), "transpose": (0, 1), "unbind": (),
    "unflatten": (0, (2, 2)), "unfold": (0, 2, 1), "unsqueeze": (0,), "view": (2, 8), "vsplit": (2,), "contiguous": (), "detach": (),
    "conj": (), "resolve_conj": (), "resolve_neg": (), "view_as_complex": (),
}  # fmt: skip
INPUTS = {"dsplit": (2, 2, 4), "view_as_complex": (4, 2)}
VIEW_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda y: y.add_(1),
    "zero_": lambda y: y.zero_(),
    "setitem": lambda y: y.__setitem__(0, 7.0),
    "copy_": lambda y: y.copy_(torch.ones_like(y)),
    "out=": lambda y: torch.neg(torch.ones(y.shape, dtype=y.dtype), out=y),
}


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
}  # fmt: skip


@pytest.mark.parametrize(
    ("cast", "given", "wanted"), [("bf16", torch.float32, torch.bfloat16), ("fp32", torch.bfloat16, torch.float32)], ids=["bf16", "fp32"]
)
def test_r10_what_gives_back_its_input_loses_no_write(cast: str, given: torch.dtype, wanted: torch.dtype) -> None:
    cases = [(name, call, write) for name, calls in NOTHING_TO_DO.items() for call in calls for write in VIEW_WRITES.values()]
    for name, call, write in cases:
        plain = torch.full((3, 4, 4), 2.0)
        write(call(plain))
        assert not (plain == 2).all(), f"in plain torch the write arrives: {name}"
    with hmp.convert(policy=hmp.Policy("mine", **{cast: set(NOTHING_TO_DO)})):
        for name, call, write in cases:
            x = torch.full((3, 4, 4), 2.0, dtype=given)
            result = call(x)
            assert result.dtype is wanted, name
            with pytest.raises(hmp.HmpError, match=f"take '{name}' off the list"):
                write(result)
            with hmp.disable_casts():
                assert (x == 2).all(), name


def test_r10_no_view_op_on_a_list_loses_a_write() -> None:
    """Either the write raises, or it arrives in the tensor that was viewed: as in plain torch."""
    with hmp.convert(policy=hmp.Policy("mine", bf16=set(CALLS))):
        for name, (what, write) in itertools.product(CALLS, VIEW_WRITES.items()):
            x = torch.ones(INPUTS.get(name, (4, 4)))
            result = getattr(x, name)(*CALLS[name]) if hasattr(x, name) else getattr(torch, name)(x, *CALLS[name])
            views = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            assert views, name
            try:
                write(views[0])
            except hmp.HmpError as error:
                assert name in str(error)
            except RuntimeError as error:
                # torch refuses to write through expand() and float numbers into complex ones, with hmp and without
                assert "single memory location" in str(error) or name == "view_as_complex", (name, what)
            else:
                assert not torch.equal(x, torch.ones_like(x)), f"{what} after {name} went to a copy, unseen"


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
    other_dtype = {"imag", "real", "view_as_real", "to", "cpu", "cuda", "data", "expand_as", "view_as", "reshape_as"}  # complex, or R7's
    properties = {"mH", "mT"}  # no list reaches these
    named_dimensions = {"rename", "align_to", "refine_names"}  # gone from later releases
    sparse = {"coalesce", "indices", "values", "ccol_indices", "col_indices", "crow_indices", "row_indices"}
    storage = {"pin_memory", "slice_inverse", "resolve_conj", "resolve_neg"}
    assert public - set(CALLS) - other_dtype - sparse - storage - properties - named_dimensions == set()
