"""`einsum.autocast` on a list: torch.autocast decides inside that op, and nowhere else, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hmp
from autocast_kit import is_real, needs_autocasts_lstm, real_state
from compile_kit import EACH_BACKEND
from oracle import BF16, F16, F32

A, B = torch.linspace(-1, 1, 16).reshape(4, 4), torch.linspace(0, 3, 16).reshape(4, 4)
pytestmark = pytest.mark.native_kernels  # torch.autocast decides inside an op where its kernels do

POLICY = hmp.Policy("inside", bf16={"einsum.autocast", "gru_cell.autocast", "interpolate.autocast", "pad.autocast"})


def under_autocast(call: Any, dtype: torch.dtype = BF16) -> Any:
    with torch.autocast("cpu", dtype=dtype):
        return call()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_the_op_is_as_under_autocast_and_its_neighbours_are_not(dtype: torch.dtype) -> None:
    want = under_autocast(lambda: torch.einsum("ij,jk->ik", A, B), dtype)
    with hmp.casts(POLICY.replace(dtype=dtype)):
        got, neighbour = torch.einsum("ij,jk->ik", A, B), torch.matmul(A, B)
    assert got.dtype is want.dtype is dtype
    assert torch.equal(got, want)
    assert neighbour.dtype is F32


def test_autocasts_state_is_what_it_was_after_a_result_and_after_an_error() -> None:
    before = real_state()
    with hmp.casts(POLICY):
        torch.einsum("ij,jk->ik", A, B)
        assert real_state() == before
        with pytest.raises(RuntimeError, match="subscript"):
            torch.einsum("ij,jk->ik", A, B[:3])
        assert real_state() == before


OUTER = {
    "another device's": lambda: torch.autocast("cuda", dtype=F16),  # without one it is disabled, with a warning
    "a disabled one": lambda: torch.autocast("cpu", enabled=False),
    "none": contextlib.nullcontext,
}
RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN, "lstm cell": nn.LSTMCell, "gru cell": nn.GRUCell, "rnn cell": nn.RNNCell}


def _trained(make: type[nn.Module], around: Any, each_step: Any) -> list[float]:
    """The losses of four steps."""
    torch.manual_seed(0)
    model, x = make(8, 8), torch.randn(3, 4, 8)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    with around():
        for _ in range(4):
            optimizer.zero_grad()
            with each_step():
                found = model(x if make in (nn.LSTM, nn.GRU, nn.RNN) else x[0])
                loss = ((found[0] if isinstance(found, tuple) else found).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(("make", "outer"), list(zip(RECURRENT.values(), itertools.cycle(OUTER.values()))))
def test_r18_inside_a_region_around_the_loop_each_step_has_the_weights_that_are_there(make: type[nn.Module], outer: Any) -> None:
    """torch empties its cache of cast weights at the end of the outermost region only, whatever that region is for."""
    if make is nn.LSTM:
        needs_autocasts_lstm()
    found = _trained(make, contextlib.nullcontext, lambda: torch.autocast("cpu", dtype=BF16))
    assert min(a - b for a, b in itertools.pairwise(found)) > 0.02  # by far more than rounding
    want = pytest.approx(found, rel=1e-2)  # torch.autocast sums the steps' gradients in bfloat16
    assert _trained(make, outer, lambda: hmp.casts("torch-cpu")) == want
    with hmp.convert(policy="torch-cpu"):
        assert _trained(make, OUTER["another device's"], contextlib.nullcontext) == want


def test_where_autocast_is_enabled_the_op_is_left_to_it() -> None:
    want = under_autocast(lambda: torch.einsum("ij,jk->ik", A, B), F16)
    with hmp.casts(POLICY), torch.autocast("cpu", dtype=F16):
        assert torch.equal(torch.einsum("ij,jk->ik", A, B), want)
        assert is_real()
        assert torch._C.get_autocast_dtype("cpu") is F16


@pytest.mark.parametrize("off", [hmp.disable_casts, lambda: torch.autocast("cpu", enabled=False)], ids=["disable_casts", "autocast"])
def test_where_casts_are_off_nothing_is_enabled(off: Any) -> None:
    plain = torch.einsum("ij,jk->ik", A, B)
    with hmp.casts(POLICY), off():
        assert torch.equal(torch.einsum("ij,jk->ik", A, B), plain)


def test_a_dispatch_mode_runs_outside_and_an_error_of_its_own_goes_through() -> None:
    seen: list[bool] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(is_real())
            if len(seen) == 3:
                raise RuntimeError("not implemented for 'BFloat16'")
            return func(*args, **(kwargs or {}))

    before = real_state()
    with hmp.casts(POLICY), Mode(), pytest.raises(RuntimeError, match="not implemented"):
        torch.einsum("ij,jk->ik", A, B)
    assert seen == [False] * 3
    assert real_state() == before


def test_what_autocast_refuses_follows_the_other_rules() -> None:
    low = A[None, None].to(BF16)
    expected = F.interpolate(low.float(), scale_factor=2.0, mode="bilinear", antialias=True)
    padded = F.pad(low, (1, 1), value=-torch.finfo(BF16).max)
    with pytest.raises(RuntimeError, match="not implemented"):
        under_autocast(lambda: F.interpolate(low, scale_factor=2.0, mode="bilinear", antialias=True))
    with hmp.casts(POLICY):
        assert torch.equal(F.interpolate(low, scale_factor=2.0, mode="bilinear", antialias=True), expected)  # R11
        assert torch.equal(F.pad(low, (1, 1), value=torch.finfo(F32).min), padded)  # R12


def test_on_a_device_that_autocast_does_not_know_the_op_is_as_unlisted() -> None:
    with hmp.casts(POLICY):
        found = torch.einsum("ij,jk->ik", A.to("meta"), B.to("meta"))
    assert found.dtype is F32


def test_float64_and_integers_are_left_to_torch() -> None:
    with hmp.casts(POLICY):
        assert torch.einsum("ij,jk->ik", A.double(), B.double()).dtype is torch.float64
        assert torch.einsum("ij,jk->ik", A.long(), B.long()).dtype is torch.int64


@pytest.mark.usefixtures("fresh_compiler")
@EACH_BACKEND
@pytest.mark.parametrize("op", ["einsum", "cell", "pad"])
def test_compiled_code_has_what_autocast_has(op: str, backend: str) -> None:
    cell = torch.nn.GRUCell(4, 4)
    call = {
        "einsum": lambda: torch.einsum("ij,jk->ik", A, B),
        "cell": lambda: cell(A, B),
        "pad": lambda: F.pad(A[None].to(BF16), (1, 1), mode="reflect"),
    }[op]
    want = under_autocast(call)
    with hmp.casts(POLICY):
        got = torch.compile(call, backend=backend, fullgraph=True)()
    assert got.dtype is want.dtype
    assert torch.equal(got, want)
    assert not is_real()


def test_explain_and_scopes_and_errors() -> None:
    said = str(hmp.explain("einsum", POLICY))
    assert "torch.autocast is on inside this op" in said
    model = torch.nn.ModuleDict({"a": torch.nn.GRUCell(4, 4), "b": torch.nn.GRUCell(4, 4)})
    want = under_autocast(lambda: model["a"](A, B))
    with hmp.casts(hmp.Policy("scoped", bf16={"gru_cell.autocast @ a"}), model=model):
        assert torch.equal(model["a"](A, B), want)
        assert not torch.equal(model["b"](A, B), under_autocast(lambda: model["b"](A, B)))
    with pytest.raises(hmp.errors.OpListError, match=r"'einsum.autocast' belongs on the BF16 list, got it on the FP32 list"):
        hmp.Policy("wrong", fp32={"einsum.autocast"})
    with pytest.raises(hmp.errors.OpListError, match="einsum"):
        hmp.Policy("wrong", bf16={"einsun.autocast"})
    with pytest.raises(hmp.errors.OpListError, match="take it off one of them"):
        hmp.Policy("wrong", bf16={"einsum.autocast"}, fp32={"einsum"})


def test_sparse_products_that_autocast_does_not_reach_stay_float32() -> None:
    sparse, rows = A.to_sparse(), A.to_sparse_csr()
    for product in (lambda: torch.sparse.mm(sparse, sparse), lambda: torch.sparse.mm(rows, B, "sum")):
        with hmp.casts("torch-cpu"):
            got = product()
        want = under_autocast(product)
        assert got.dtype is want.dtype is F32 and torch.equal(got.to_dense(), want.to_dense())
