"""A recording says what torch did, beside dispatch modes of the tests' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import hmp
from autocast_kit import needs_autocasts_lstm

BF16, F32 = torch.bfloat16, torch.float32
X = torch.linspace(-1, 1, 64).reshape(8, 8)
LOW = X.bfloat16()
HELD = (torch.mm,)  # a tuple: hmp does not find it there


class Ran(TorchDispatchMode):
    """The ATen ops that ran, each with the dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, list[torch.dtype]]] = []
        self.cast_bytes = 0
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.ops.append((name, [tensor.dtype for tensor in tensors]))
        self.cast_bytes += tensors[0].nbytes if name == "_to_copy" else 0
        result = func(*args, **(kwargs or {}))
        self.made += [f"cast {tensors[0].dtype} to {result.dtype}".replace("torch.", "")] if name == "_to_copy" else []
        return result


def recorded(call: Callable[[], Any], policy: Any = "torch-cpu") -> tuple[hmp.types.Report, Ran]:
    """The call recorded, and again under the tests' mode."""
    with torch.no_grad(), hmp.casts(policy):
        with hmp.record() as report:
            call()
        with Ran() as ran:
            call()
    return report, ran


INSIDE = {
    "einsum": (lambda: torch.einsum("ij,jk->ik", X, X), "bfloat16"),
    "lstm": (lambda: nn.LSTM(8, 4, num_layers=2)(X[None]), "bfloat16"),
    "cov": (lambda: torch.cov(X), None),
    "pad": (lambda: F.pad(LOW[None], (1, 1), mode="reflect"), "float32"),
}


@pytest.mark.native_kernels
@pytest.mark.parametrize("watch", [hmp.record, hmp.detect_nonfinite])
def test_gradients_of_a_recurrent_layer_are_those_of_an_unwatched_run(watch: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 16, num_layers=2, bidirectional=True), torch.randn(9, 4, 8)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with hmp.casts("torch-cpu"):
            loss = model(x)[0].float().square().sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    unwatched = gradients()
    with watch():
        watched = gradients()
    assert len(watched) == 16 and all(map(torch.equal, watched, unwatched))


@pytest.mark.native_kernels
@pytest.mark.parametrize("op", INSIDE)
def test_what_autocast_does_inside_an_op_is_told(op: str) -> None:
    if op == "lstm":
        needs_autocasts_lstm()
    call, computes = INSIDE[op]
    report, ran = recorded(call)
    (row,) = [row for row in report.rows if row.op == op]
    assert (row.rule, row.casts, row.cast_bytes) == ("autocast", len(ran.made), ran.cast_bytes)
    assert row.source.startswith(f"{op}.autocast (")
    kernels = {dtype for name, dtypes in ran.ops if name != "_to_copy" for dtype in dtypes[:1] if dtype in (BF16, F32)}
    assert set(row.compute.split(", ")) <= {str(dtype).removeprefix("torch.") for dtype in kernels}
    assert computes is None or computes in row.compute.split(", ")
    products = {dtypes[0] for name, dtypes in ran.ops if name in ("mm", "bmm", "addmm", "mkldnn_rnn_layer")}
    if products == {BF16}:
        with pytest.raises(AssertionError, match="did not compute in float32"):
            report.assert_dtype(op, F32)


def test_a_second_call_of_the_same_kind_counts_as_the_first() -> None:
    with hmp.casts("torch-cpu"), hmp.record() as report:
        for _ in range(3):
            torch.einsum("ij,jk->ik", X, X)
        torch.einsum("ij,jk->ik", X, X.bfloat16())
    rows = {row.inputs: (row.calls, row.casts, row.cast_bytes) for row in report.rows if row.op == "einsum"}
    assert rows == {"float32": (3, 6, 6 * 256), "float32, bfloat16": (1, 1, 256)}


WIDENED = {
    "softmax": (lambda: F.softmax(LOW, -1, dtype=F32), F32),
    "log_softmax": (lambda: LOW.log_softmax(-1, dtype=torch.float64), torch.float64),
    "sum": (lambda: LOW.sum(dtype=F32), F32),
    "float_power": (lambda: torch.float_power(X, 2), torch.float64),
    "lt": (lambda: X > LOW, F32),
    "mul": (lambda: LOW * LOW, BF16),
    "gt": (lambda: LOW > LOW, BF16),
}


@pytest.mark.parametrize("policy", [hmp.Policy("nothing", bf16={"conv1d"}), "torch-cpu"], ids=str)
def test_what_torch_itself_widens_computes_in_the_wide_dtype(policy: Any) -> None:
    with torch.no_grad(), hmp.casts(policy):
        for op, (call, dtype) in WIDENED.items():
            with hmp.record() as report:
                call()
            (row,) = report.rows
            assert row.compute == str(dtype).removeprefix("torch."), row
            assert row.op in (op, "gt")  # `X > LOW` may be told as either


def test_statistics_of_a_norm_that_are_cast_are_counted() -> None:
    norm = nn.BatchNorm1d(8).bfloat16()
    report, ran = recorded(lambda: norm(X))
    (row,) = [row for row in report.rows if row.op == "batch_norm"]
    assert (row.casts, row.cast_bytes) == (len(ran.made), ran.cast_bytes) == (4, 64)


def test_ops_have_the_names_that_lists_spell() -> None:
    with hmp.convert(policy=hmp.Policy("few", bf16={"mm"}, promote={"block_diag"})), hmp.record() as report:
        torch.block_diag(LOW, X)
        torch.atleast_2d(X)
        X.size()
        HELD[0](LOW, LOW)
    assert [(row.op, row.rule) for row in report.rows] == [("block_diag", "promote"), ("atleast_2d", "unlisted"), ("mm", "bypassed")]
    assert "block_diag" not in report.never_called
    assert "bypassed: mm" in str(report)


def test_reports_of_two_policies_together_say_what_was_called_in_neither() -> None:
    def report(idle: str, call: Callable[[torch.Tensor], Any] = torch.exp) -> hmp.types.Report:
        with hmp.casts(hmp.Policy(fp32={idle})), hmp.record() as found:
            call(X)
        return found

    assert report("tanh").merge(report("log")).never_called == ["log", "tanh"]
    assert report("tanh").merge(report("tanh", torch.tanh)).never_called == []


@pytest.mark.native_kernels
def test_a_recomputation_that_ends_early_is_no_exception() -> None:
    linear = nn.Linear(8, 8)
    with hmp.casts("torch-cpu"), hmp.record() as report:
        checkpoint(lambda x: linear(linear(x)), X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert report.notes == []
    assert all(row.raised == 0 for row in report.rows)
