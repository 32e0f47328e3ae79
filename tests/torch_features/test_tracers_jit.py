"""torch.jit.trace holds the casts, torch.jit.script compiles code without casts; neither crashes where hmp tries an op twice."""

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


TRIED_TWICE = {
    "R7, asked first": (lambda x: torch.bmm(x[None].bfloat16(), x[None]), lambda x: torch.bmm(x[None].bfloat16(), x[None].bfloat16())),
    "R11, known": (lambda x: torch.linalg.inv(x), lambda x: torch.linalg.inv(x)),
    "R11, learned": (lambda x: torch.mm(x.to_sparse_csr(), x), lambda x: torch.mm(x.to_sparse_csr(), x)),
    "R11, into out": (lambda x: torch.mm(x.to_sparse_csr(), x, out=torch.empty(4, 4)), lambda x: torch.mm(x.to_sparse_csr(), x)),
}


@pytest.mark.parametrize("name", TRIED_TWICE)
def test_a_trace_goes_on_after_an_op_that_was_refused(name):
    """torch ends a trace at an error, and crashes at the trace's end where somebody has caught the error."""
    function, by_explicit_casts = TRIED_TWICE[name]

    def traced_function(x):
        return torch.relu(function(torch.relu(x).float())).float()

    hmp.convert(policy=LISTS)
    for _ in range(2):  # what is learned at the first time is known at the second
        # without the check: it compares lines of source, which differ between learning and knowing
        traced = torch.jit.trace(traced_function, (X,), check_trace="learned" not in name and "out" not in name)
        want = by_explicit_casts(X.to(BF16).relu().float()).to(BF16).relu().float()
        same(traced(X), want)
        same(traced_function(X), want)


def test_an_error_that_traced_code_catches_is_said():
    """In plain torch this crashes the interpreter."""

    def function(x):
        try:
            torch.mm(x, x[:3])
        except RuntimeError:
            return x.relu()

    with hmp.casts(LISTS), pytest.raises(RuntimeError, match="ended this trace"):
        torch.jit.trace(function, (X,))


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.softmax(self.linear(x) @ x.t(), -1), F.relu(x), x.relu(), torch.mul(x, 2), F.gelu(x), torch.special.expit(x)


def test_scripted_code_has_no_casts():
    model, x = Scripted(), torch.randn(4, 4)
    want = torch.jit.script(model)(x)
    with hmp.convert():
        scripted = torch.jit.script(Scripted())
        under = scripted(x)
    for got in (under, scripted(x)):
        for one, other in zip(got, want, strict=True):
            same(one.detach(), other.detach())


def test_a_trace_calls_scripted_code_without_casts():
    @torch.jit.script
    def compiled(x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            return torch.relu(x)
        return x

    with hmp.casts(LISTS):
        traced = torch.jit.trace(lambda x: compiled(torch.mm(x, x)).float() + torch.relu(x), (X,))
    low = X.to(BF16)
    same(traced(X), torch.mm(low, low).relu().float() + low.relu())


OF_TORCH_JIT = {
    "scripted": torch.jit.script,
    "frozen": lambda layer: torch.jit.freeze(torch.jit.script(layer.eval())),
    "traced without casts": lambda layer: torch.jit.trace(layer, (X,)),
}


@pytest.mark.parametrize("made", OF_TORCH_JIT)
def test_a_module_of_torch_jit_behind_a_cast_layer_runs_in_its_parameters_dtype(made):
    first, layer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    inside = OF_TORCH_JIT[made](layer)
    low = F.linear(X.to(BF16), first.weight.to(BF16), first.bias.to(BF16))
    want = F.linear(low.float(), layer.weight, layer.bias)
    with hmp.casts(LISTS):
        got = inside(first(X))
        same(got.detach(), want.detach())
        with hmp.disable_casts(), pytest.raises(RuntimeError, match="same dtype"):
            inside(X.to(BF16))  # as torch has it
    (weight,) = torch.autograd.grad(got.sum(), [first.weight])
    same(weight, torch.autograd.grad(want.sum(), [first.weight])[0])


def test_code_of_torch_jit_that_casts_or_holds_no_float32_gets_what_it_is_given():
    first, layer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    low = F.linear(X.to(BF16), first.weight.to(BF16), first.bias.to(BF16))
    with hmp.casts(LISTS):
        with_casts = torch.jit.trace(layer, (X.to(BF16),))  # its input stands in no cast
        same(with_casts(first(X)).detach(), F.linear(low, layer.weight.to(BF16), layer.bias.to(BF16)).detach())
        same(torch.jit.script(torch.nn.ReLU())(first(X)).detach(), low.relu().detach())


def test_a_write_of_code_of_torch_jit_into_an_input_that_was_cast_for_it_is_an_error():
    class Writes(torch.nn.Linear):
        def forward(self, input):
            input.add_(1.0)
            return F.linear(input, self.weight, self.bias)

    first, writes = torch.nn.Linear(4, 4), torch.jit.script(Writes(4, 4))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, hmp.casts(LISTS), pytest.raises(hmp.HmpError, match=r"Writes of torch\.jit wrote into its argument `argument 1`"):
            writes(first(X))
