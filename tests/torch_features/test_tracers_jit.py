"""torch.jit.trace holds the casts, and torch's error where torch refuses an op; torch.jit.script compiles code without casts."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F

import hmp
from oracle import BF16, F32
from trap_kit import policy, same

warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.jit")
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(5)) + 4 * torch.eye(4)
LISTS = policy(bf16=["linear", "matmul", "relu", "mm", "t", "linalg.inv", "layer_norm"], fp32=["softmax"])


class Model(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = torch.nn.Linear(width, width), torch.nn.LayerNorm(width)

    def forward(self, x):
        hidden = self.norm(self.linear(x))
        return torch.softmax(hidden @ hidden.t(), -1), F.relu(x), x.relu()


def by_hand(model, x):
    low, width = x.to(BF16), len(model.linear.bias)
    hidden = F.linear(low, model.linear.weight.to(BF16), model.linear.bias.to(BF16))
    hidden = F.layer_norm(hidden, (width,), model.norm.weight, model.norm.bias)
    return torch.softmax((hidden @ hidden.t()).to(F32), -1), low.relu(), low.relu()


@pytest.mark.native_kernels
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("width", [4, 96], ids=["small", "of a size that is shared"])
def test_a_trace_holds_the_casts_also_when_it_is_saved_and_loaded(width, tmp_path):
    model, x = Model(width), torch.randn(width, width)
    with hmp.casts(LISTS):
        traced = torch.jit.trace(model, (x,))  # torch checks it: traces the model again, without gradients
    traced.save(tmp_path / "traced.pt")
    hmp.revert()
    wanted = by_hand(model, x)
    for scope in (hmp.casts(policy(fp32=["*"])), hmp.casts(LISTS), contextlib.nullcontext()):
        with scope:
            results = traced(x), torch.jit.load(tmp_path / "traced.pt")(x)
        for got in results:
            for one, other in zip(got, wanted, strict=True):
                same(one.detach(), other.detach())


def traced_inverse(x):
    return torch.relu(torch.linalg.inv(torch.relu(x).float())).float()


def test_a_trace_holds_the_float32_call_of_an_op_that_is_known_to_have_no_kernel():
    with hmp.casts(LISTS):
        same(torch.jit.trace(traced_inverse, (X,))(X), torch.linalg.inv(X.to(BF16).relu().float()).to(BF16).relu().float())


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
            torch.jit.trace(lambda x: torch.relu(function(torch.relu(x).float())), (X.clone(),))
        assert torch._C._get_tracing_state() is None
        assert function(X.clone()).shape == X.shape


def scripted(x):
    return torch.softmax(F.linear(x, x) @ x.t(), -1), F.relu(x), x.relu(), torch.mul(x, 2), F.gelu(x)


def test_scripted_code_has_no_casts():
    want = scripted(X)
    with hmp.convert():
        compiled = torch.jit.script(scripted)
        under = compiled(X)
    for got in (under, compiled(X)):
        for one, other in zip(got, want, strict=True):
            same(one, other)
