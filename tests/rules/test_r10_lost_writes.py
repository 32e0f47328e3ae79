"""R10: a cast turns a view into a copy, and a write that would be lost in that copy is refused, with the remedy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

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
            with pytest.raises(hmp.HmpError, match="'dropout' is on a list that casts"):
                F.dropout(kept, 0.5, training=False).__iadd__(1)
        for fill in (torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.kaiming_uniform_):
            with pytest.raises(hmp.HmpError, match="'dropout' is on a list that casts"):
                fill(F.dropout(base, 0.5, training=False))
    assert y.tolist() == [5.0, 2.0, 2.0] and y.dtype is LOW
    assert (x == 1).all() and (base == 1).all()
