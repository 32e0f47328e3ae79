"""Under a device map an int32 tensor where torch wants int64 is taken: as `.long()` by hand; without a map torch's own error stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from hmp.compat import habana
from hmp.compat.habana import int32

Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

NLL = nn.NLLLoss()
# Of each op of the table a call that torch refuses with an int32 `i`, in the forward or in the backward; x is 4 by 4, i holds 0 to 3.
FORMS: dict[str, Form] = {
    "cross_entropy_loss": lambda x, i: nn.CrossEntropyLoss(label_smoothing=0.1)(x, i),
    "nll_loss": lambda x, i: torch._C._nn.nll_loss(x, i),
    "nll_loss2d": lambda x, i: torch._C._nn.nll_loss2d(x[None, :, :, None], i[None, :, None]),
    "nll_loss_nd": lambda x, i: F.nll_loss(input=x.log_softmax(-1), target=i) + NLL(x[None], i[None]),
    "multi_margin_loss": lambda x, i: F.multi_margin_loss(x, i),
    "multilabel_margin_loss": lambda x, i: nn.MultiLabelMarginLoss()(x[0], i),
    "linear_cross_entropy": lambda x, i: F.linear_cross_entropy(x, x.detach()[1:] * 2, i % 3),
    "one_hot": lambda x, i: F.one_hot(i, 4) * x,
    "max_unpool2d": lambda x, i: F.max_unpool2d(x[None, :1, :], i[None, None], (1, 2), output_size=(1, 8)),
    "max_unpool3d": lambda x, i: nn.MaxUnpool3d((1, 1, 2))(x[None, None, :1, :], i[None, None, None]),
    "put": lambda x, i: torch.put(x, i, x.detach()[1], accumulate=True),
    "put_": lambda x, i: x.clone().put_(index=i, source=x.detach()[1]),
    "take": lambda x, i: torch.take(x, i) + x.take(index=i),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i[None], dim=1) + x.take_along_dim(i[None], 0),
    "tensor_split": lambda x, i: torch.cat([*torch.tensor_split(x, i.sort().values)[1:], *x.tensor_split(i.sort().values[1:])[:2]]),
    "index_copy": lambda x, i: torch.index_copy(x, 0, i[:2], x.detach()[2:]) * x.index_copy(0, index=i[:2], source=x.detach()[2:]),
    "index_copy_": lambda x, i: x.clone().index_copy_(0, i[:2], x.detach()[2:]) * x,
    "index_fill": lambda x, i: torch.index_fill(x, 0, i[:2], 2.0) * x.index_fill(1, i[:1], torch.tensor(3.0)),
    "index_fill_": lambda x, i: x.clone().index_fill_(dim=0, index=i[:2], value=2.0),
    "index_reduce": lambda x, i: torch.index_reduce(x, 0, i[:2], x.detach()[2:], "amax", include_self=False),
    "index_reduce_": lambda x, i: x.clone().index_reduce_(0, i[:2], x.detach()[2:], "mean", include_self=False),
    "index_select": lambda x, i: torch.index_select(x.detach().to_sparse(), 0, i).to_dense() * x,
    "searchsorted": lambda x, i: torch.searchsorted(x.detach()[0], x.detach()[1], sorter=i) * x,
    "gather": lambda x, i: torch.gather(x, 1, i[None]) + x.gather(0, index=i[None]),
    "scatter": lambda x, i: torch.scatter(x, 1, i[None], 2.0) * x.scatter(0, i[None], x[:1]),
    "scatter_": lambda x, i: x.clone().scatter_(1, i[:, None], 1.0),
    "scatter_add": lambda x, i: torch.scatter_add(x, 1, i[None], x[:1]),
    "scatter_add_": lambda x, i: x.clone().scatter_add_(1, i[None], x[:1]),
    "scatter_reduce": lambda x, i: torch.scatter_reduce(x, 1, i[None], x[:1], "amax"),
    "scatter_reduce_": lambda x, i: x.clone().scatter_reduce_(1, i[None], x[:1], "sum"),
}


def is_in_torch(op: str) -> bool:
    try:
        return bool(hmp.explain(op).sites)
    except hmp.errors.OpListError:
        return False


IN_FORCE = [op for wide in int32.active_rows() for op in wide.ops.split() if is_in_torch(op)]
INDEX = torch.tensor([2, 0, 3, 1])


def results(form: Form, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a form returns, and the gradient."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    found = form(x, index)
    found.float().sum().backward()
    assert x.grad is not None
    return found.detach(), x.grad


def same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_without_a_device_map_torchs_own_error_stays() -> None:
    refusals: dict[str, set[str]] = {op: set() for op in IN_FORCE}
    for shim in (contextlib.nullcontext(), habana.install(None), contextlib.nullcontext()):
        with shim:
            for op, said in refusals.items():
                with pytest.raises((RuntimeError, IndexError)) as error:
                    results(FORMS[op], INDEX.int())
                said.add(str(error.value))
    assert {op for op, said in refusals.items() if len(said) > 1} == set()


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("policy", [None, "habana", "habana-o2"])
def test_under_a_device_map_int32_is_int64_by_hand(policy: str | None) -> None:
    with contextlib.nullcontext() if policy is None else hmp.convert(policy=policy):
        wanted = {op: results(FORMS[op], INDEX) for op in IN_FORCE}
        with habana.install("cpu"):
            for op in IN_FORCE:
                assert same(results(FORMS[op], INDEX.int()), wanted[op]), op
                assert same(results(FORMS[op], INDEX), wanted[op]), op


def test_other_types_and_other_arguments_are_left_alone() -> None:
    x = torch.randn(4, 4)
    with habana.install("cpu"):
        for index in (INDEX.short(), INDEX.bool(), INDEX.float()):
            with pytest.raises((RuntimeError, IndexError)):
                torch.take(x, index)
        assert F.cross_entropy(x, INDEX.to(torch.uint8)) == F.cross_entropy(x, INDEX)  # torch takes bytes
        assert F.cross_entropy(x, x.softmax(-1)).dim() == 0  # probabilities
        assert [each.shape[0] for each in x.tensor_split(3)] == [2, 1, 1]
        assert torch.index_copy(x.int(), 0, INDEX.int(), x.int()).dtype is torch.int32  # values are not widened
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.index_copy(x.long(), 0, INDEX.int(), x.int())
