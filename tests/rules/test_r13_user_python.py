"""R13: user Python that autograd calls runs without lists, wherever backward runs; what torch would refuse there is made to fit.

Gradients wherever backward is called: torch.func, torch.autograd.functional and forward mode go through listed ops. Random graphs and the
gradients of single calls P9 and P1 ask (tests/properties).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import hmp
from oracle import BF16, F16, F32, saturated
from trap_kit import policy, same

OTHER = policy(fp32=["matmul"], bf16=["softmax", "log"])
SCOPES = {"convert": hmp.convert, "casts": lambda: hmp.casts("habana"), "another policy": lambda: hmp.casts(OTHER)}
AROUND_BACKWARD = (nullcontext, hmp.disable_casts, hmp.enable_casts, lambda: hmp.casts("habana"), lambda: hmp.casts(OTHER))


class Seen:
    """What user Python finds: whether casts are on, and what listed ops give, a method, an operator and a function among them."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def note(self, *_: object) -> None:
        wide, low = torch.ones(2, 2), torch.ones(2, 2, dtype=BF16)
        made = torch.matmul(wide, wide), wide * 2, F.softmax(low, -1), low.log(), F.linear(wide, wide)
        self.notes.append((hmp.casts_enabled(), *(t.dtype for t in made)))

    def assert_without_lists(self, times: int) -> None:
        assert self.notes == [(False, F32, F32, BF16, BF16, F32)] * times, self.notes


SEEN = Seen()


class Identity(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        SEEN.note()
        return gradient


class Once(Identity):
    backward = staticmethod(once_differentiable(Identity.backward))


def _module(x: torch.Tensor, register: Callable[[torch.nn.Module], Any]) -> torch.Tensor:
    module = torch.nn.Linear(3, 3)
    register(module)
    return module(x)


def _with_hook(tensor: torch.Tensor, register: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    register(tensor)
    return tensor


def _queues_a_callback(gradient: torch.Tensor) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(SEEN.note)


def _unpacking(x: torch.Tensor) -> torch.Tensor:
    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        SEEN.note()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        return x.exp()


# how user Python gets into a backward: what is made of a leaf, with one call of SEEN.note in its backward
PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Tensor.register_hook": lambda x: _with_hook(torch.relu(x), lambda t: t.register_hook(SEEN.note)),
    "a hook of a leaf": lambda x: torch.relu(_with_hook(x, lambda t: t.register_hook(SEEN.note))),
    "register_post_accumulate_grad_hook": lambda x: torch.relu(_with_hook(x, lambda t: t.register_post_accumulate_grad_hook(SEEN.note))),
    "grad_fn.register_hook": lambda x: _with_hook(torch.relu(x), lambda t: t.grad_fn.register_hook(SEEN.note)),
    "grad_fn.register_prehook": lambda x: _with_hook(torch.relu(x), lambda t: t.grad_fn.register_prehook(SEEN.note)),
    "a module's full backward hook": lambda x: _module(x, lambda m: m.register_full_backward_hook(SEEN.note)),
    "a module's full backward pre-hook": lambda x: _module(x, lambda m: m.register_full_backward_pre_hook(SEEN.note)),
    "register_multi_grad_hook": lambda x: _with_hook(
        torch.relu(x), lambda t: torch.autograd.graph.register_multi_grad_hook((t,), SEEN.note)
    ),
    "queue_callback": lambda x: _with_hook(torch.relu(x), lambda t: t.register_hook(_queues_a_callback)),
    "an unpack hook": _unpacking,
    "Function.backward": Identity.apply,
    "once_differentiable": Once.apply,
}


@pytest.mark.parametrize("scope", SCOPES)
def test_r13_user_python_in_backward_runs_without_lists(scope: str) -> None:
    for place in PLACES.values():
        for around in AROUND_BACKWARD:
            SEEN.notes.clear()
            x = torch.randn(3, 3, requires_grad=True)
            with SCOPES[scope]():
                loss = place(x).float().sum()
                with around():
                    before = hmp.casts_enabled()
                    loss.backward()
                    assert hmp.casts_enabled() == before
            SEEN.assert_without_lists(1)
            assert x.grad.dtype is F32


def test_r13_it_does_so_in_every_way_to_start_a_backward_and_in_the_backward_of_a_backward() -> None:
    starts: tuple[Callable[[torch.Tensor, torch.Tensor], Any], ...] = (
        lambda loss, x: loss.backward(),
        lambda loss, x: torch.autograd.backward([loss], inputs=[x]),
        lambda loss, x: torch.autograd.grad(loss, x),
        lambda loss, x: torch.autograd.grad(loss, x, create_graph=True),
        lambda loss, x: torch.autograd.grad(loss, x, torch.ones(2), is_grads_batched=True),
    )
    with hmp.casts("habana"):
        for start in starts:
            SEEN.notes.clear()
            x = torch.randn(3, 3, requires_grad=True)
            hidden = torch.relu(x)
            hidden.register_hook(SEEN.note)
            start(hidden.float().sum(), x)
            SEEN.assert_without_lists(1)
        SEEN.notes.clear()
        hidden = Identity.apply(x)
        (gradient,) = torch.autograd.grad((hidden * hidden).float().sum(), x, create_graph=True)
        gradient.register_hook(SEEN.note)
        gradient.sum().backward()
        SEEN.assert_without_lists(2 + 1)  # Identity's twice, and the hook


def test_r13_a_hook_may_switch_casts_on_and_that_ends_with_it_or_with_its_error() -> None:
    seen = []

    def hook(gradient: torch.Tensor) -> None:
        with hmp.enable_casts():
            seen.append((hmp.casts_enabled(), torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype))
        with hmp.casts(policy(bf16=["add"])):
            seen.append((hmp.casts_enabled(), torch.add(torch.ones(2), 1).dtype))
        seen.append((hmp.casts_enabled(), None))

    def fails(gradient: torch.Tensor) -> None:
        seen.append((hmp.casts_enabled(), None))
        raise KeyError

    x = torch.randn(2, requires_grad=True)
    x.register_hook(hook)
    x.register_hook(fails)
    with hmp.casts("habana"):
        with pytest.raises(KeyError):
            x.sum().backward()
        assert hmp.casts_enabled()
    assert not hmp.casts_enabled()
    assert seen == [(True, BF16), (True, BF16), (False, None), (False, None)]


# --- in backward, what torch would refuse is made to fit


class Product(Function):
    """A user's product whose forward is cast and whose backward meets the low gradient with the float32 weight that it saved."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        Product.seen = gradient.dtype, weight.dtype
        return gradient @ weight.mT, x.mT @ gradient

    seen: tuple[torch.dtype, ...]


def test_r13_a_low_gradient_and_a_float32_weight_meet_in_a_users_backward() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    with hmp.casts("habana"):
        Product.apply(x, weight).float().square().sum().backward()
    assert Product.seen == (BF16, F32)
    low = x.detach().to(BF16) @ weight.detach().to(BF16)
    gradient = (2 * low.float()).to(BF16)
    same(x.grad, (gradient @ weight.detach().to(BF16).mT).float())  # R7: the gradient comes first
    same(weight.grad, x.detach().mT @ gradient.float())  # R7: x comes first


def test_r13_in_backward_nothing_else_is_changed() -> None:
    seen = []

    def hook(gradient: torch.Tensor) -> None:
        wide, low = torch.randn(2, 2), torch.randn(2, 2).to(BF16)
        seen.extend(t.dtype for t in (torch.add(low, wide), torch.mul(low, 3), torch.mm(low, low), torch.mm(wide, wide), low.to(F32)))
        seen.append(torch.is_autocast_enabled("cpu"))

    x = torch.randn(2, requires_grad=True)
    x.register_hook(hook)
    with hmp.casts("habana"):
        x.sum().backward()
    assert seen == [F32, BF16, BF16, F32, F32, False]


def test_r13_disable_casts_around_backward_leaves_torch_exactly_torch_in_it() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    with hmp.casts("habana"):
        loss = Product.apply(x, weight).float().square().sum()
        with hmp.disable_casts(), pytest.raises(RuntimeError, match="dtype"):
            loss.backward()


# --- code that runs in forward although it belongs to a gradient


def _noting_pack(tensor: torch.Tensor) -> torch.Tensor:
    SEEN.note()
    return tensor * 1


def test_r13_pack_hooks_run_without_casts_as_their_unpack_does() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    w = torch.randn(3, 3, requires_grad=True)
    ops = {"exp": lambda: x.exp(), "matmul": lambda: torch.matmul(x, w), "layer_norm": lambda: F.layer_norm(x, (3,), w[0])}
    with hmp.casts("habana"):
        for name, op in ops.items():
            op().float().sum().backward()
            expected = x.grad
            x.grad = None
            SEEN.notes.clear()
            with torch.autograd.graph.saved_tensors_hooks(_noting_pack, lambda tensor: tensor):
                op().float().sum().backward()
            assert SEEN.notes, name
            SEEN.assert_without_lists(len(SEEN.notes))
            same(x.grad, expected)
            x.grad = None


# --- backward inside backward, checkpoints in hooks


def test_r13_a_backward_inside_a_hook_restores_the_state_of_the_outer_one() -> None:
    SEEN.notes.clear()

    @torch.enable_grad()
    def nested(gradient: torch.Tensor) -> None:
        inner = torch.randn(2, 2, requires_grad=True)
        with hmp.enable_casts():
            loss = torch.matmul(inner, inner)
            assert loss.dtype is BF16
        inner.register_hook(SEEN.note)
        loss.float().sum().backward()
        SEEN.note()

    x = torch.randn(2, 2, requires_grad=True)
    with hmp.casts("habana"):
        hidden = torch.relu(x)
        hidden.register_hook(nested)
        hidden.register_hook(SEEN.note)
        x.register_hook(SEEN.note)
        hidden.float().sum().backward()
        assert hmp.casts_enabled()
    SEEN.assert_without_lists(4)


def test_r13_a_backward_in_a_hook_in_autograds_own_thread_knows_the_policy_of_the_outer_one() -> None:
    """A context of its own stands for such a thread, which a CPU has none of: torch's context is then the empty one of the inner call."""
    found: list[torch.dtype] = []

    def note(_: torch.Tensor) -> None:
        with hmp.enable_casts():
            found.append(torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype)

    @torch.enable_grad()
    def nested() -> None:
        inner = torch.randn(2, requires_grad=True)
        inner.register_hook(note)
        inner.exp().sum().backward()

    x = torch.randn(2, requires_grad=True)
    x.register_hook(lambda _: contextvars.Context().run(nested))
    with hmp.casts("habana"):
        x.exp().sum().backward()
    assert found == [BF16]


@pytest.mark.parametrize("reentrant", [True, False])
def test_r13_a_checkpoint_inside_a_hook_is_recomputed_as_it_ran_there(reentrant: bool) -> None:
    runs = []

    def block(t: torch.Tensor) -> torch.Tensor:
        runs.append(torch.matmul(t, t).dtype)
        return torch.matmul(t, t).sin()

    @torch.enable_grad()
    def hook(gradient: torch.Tensor) -> None:
        inner = torch.randn(2, 2, requires_grad=True)
        checkpoint(block, inner, use_reentrant=reentrant).sum().backward()
        with hmp.enable_casts():
            loss = checkpoint(block, inner, use_reentrant=reentrant).float().sum()
        loss.backward()

    x = torch.randn(2, 2, requires_grad=True)
    x.register_hook(hook)
    with hmp.casts("habana"):
        x.sum().backward()
    assert runs == [F32, F32, BF16, BF16]


# --- outside of any policy, torch raises what it raises without hmp


LOW_MATRIX, WIDE_MATRIX = torch.ones(3, 3, dtype=BF16), torch.ones(3, 3)
REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "mm": lambda a, b: torch.mm(a, b), "@": lambda a, b: a @ b, "linear": lambda a, b: F.linear(a, b), "dot": lambda a, b: a[0].dot(b[0]),
    "conv1d": lambda a, b: F.conv1d(a[None], b[None]), "index_add": lambda a, b: a.index_add(0, torch.tensor([0, 1, 2]), b),
    "layer_norm": lambda a, b: F.layer_norm(a, (3,), b[0], b[0]), "cdist": lambda a, b: torch.cdist(a, b),
}  # fmt: skip


MIXTURES = [(op, given) for op in REFUSED for given in ((LOW_MATRIX, WIDE_MATRIX), (WIDE_MATRIX, LOW_MATRIX))]


def _error(op: str, given: tuple[torch.Tensor, ...]) -> tuple[type, str] | None:
    try:
        REFUSED[op](*given)
    except Exception as error:
        return type(error), str(error)
    return None


def _errors_in_backward(made_under: Any = nullcontext) -> list[tuple[type, str] | None]:
    """Those of the mixtures in a hook of a graph that was made in a context, and runs outside of it; and in the backward of that."""
    found: list[tuple[type, str] | None] = []
    x = torch.ones(2, requires_grad=True)
    with made_under():
        made = x * x
        made.register_hook(lambda _: found.extend(_error(*each) for each in MIXTURES))
    (gradient,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    gradient.register_hook(lambda _: found.extend(_error(*each) for each in MIXTURES))
    gradient.sum().backward()
    return found


@pytest.mark.usefixtures("unpatched")
def test_r7_outside_of_a_policy_a_mixture_raises_what_torch_raises() -> None:
    expected, in_backward = [_error(*each) for each in MIXTURES], _errors_in_backward()
    assert sum(each is not None for each in expected) > len(REFUSED)  # torch takes a few in one of the two orders
    with hmp.casts("habana"):
        assert [_error(*each) for each in MIXTURES] == [None] * len(MIXTURES)
    for around in (nullcontext, lambda: hmp.casts(OTHER)):
        with around(), hmp.disable_casts():
            assert [_error(*each) for each in MIXTURES] == expected and _errors_in_backward() == in_backward


def test_r13_a_graph_that_was_made_under_a_policy_is_helped_where_backward_runs_outside_of_it() -> None:
    assert set(_errors_in_backward(lambda: hmp.casts("habana"))[: len(MIXTURES)]) == {None}
    assert _errors_in_backward() == 2 * [_error(*each) for each in MIXTURES] != [None] * 2 * len(MIXTURES)


# --- torch.func and torch.autograd.functional


TF, W = torch.func, torch.linspace(1, -2, 9).reshape(3, 3).sin()


def test_r13_what_a_transform_gives_back_follows_the_casts_where_it_is_called() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.matmul(x, x).dtype)
        return torch.matmul(x, x).float().sum()

    for transform in (TF.grad, TF.jacrev, TF.jacfwd, TF.hessian):
        made_outside = transform(function)
        with hmp.casts("habana"):
            made_inside = transform(function)
            made_outside(W)
        assert set(seen) == {BF16}
        seen.clear()
        made_inside(W)
        assert set(seen) == {F32}
        seen.clear()


# --- forward mode


@pytest.mark.native_kernels  # compared bit for bit
def test_r13_a_dual_tensor_keeps_its_tangent_through_casts() -> None:
    ops: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
        "bf16": (lambda x: torch.matmul(x, x), lambda x: torch.matmul(x.to(BF16), x.to(BF16))),
        "fp32": (lambda x: torch.log(x.abs() + 1), lambda x: torch.log((x.abs() + 1).float())),
        "promote": (lambda x: torch.cat([x, x.to(BF16)]), lambda x: torch.cat([x.float(), x.to(BF16).float()])),
        "view": (lambda x: x.t(), lambda x: x.t()),
        "saturating": (lambda x: x * 3e38, lambda x: x * 3e38),
        "norm": (lambda x: F.layer_norm(x, (3,)), lambda x: F.layer_norm(x.to(BF16), (3,))),
        "first": (lambda x: x.to(BF16).index_add(0, torch.tensor([0]), x[:1]), _index_add_by_hand),
        "in place": (lambda x: x.clone().mul_(x.to(BF16)), lambda x: x.clone().mul_(x.to(BF16))),
    }
    for name, (call, by_hand) in ops.items():
        with forward_ad.dual_level():
            expected = forward_ad.unpack_dual(by_hand(forward_ad.make_dual(W.clone(), W.cos())))
            with hmp.casts("habana"):
                got = forward_ad.unpack_dual(call(forward_ad.make_dual(W.clone(), W.cos())))
            assert got.tangent is not None, name
            if name != "saturating":
                same(got.primal.as_subclass(torch.Tensor), expected.primal)
                same(got.tangent.as_subclass(torch.Tensor), expected.tangent)


def _index_add_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x.to(BF16).index_add(0, torch.tensor([0]), x[:1].to(BF16))


def test_r13_the_gradient_of_a_saturated_mask_sum_is_that_of_the_scores() -> None:
    scores = torch.randn(4, 4).to(F16).requires_grad_()
    mask = torch.full((4, 4), torch.finfo(F32).min).triu(1)
    with hmp.casts(policy(fp32=["softmax"], bf16=["add"], dtype=F16)):
        torch.softmax(scores + mask, -1).square().sum().backward()
    got, scores.grad = scores.grad, None
    torch.softmax((scores + saturated(mask, F16)).float(), -1).square().sum().backward()
    assert torch.isfinite(got).all() and got.any()
    same(got, scores.grad)


# --- Tensor.grad_dtype: float32 gradients of low-precision weights

HAS_GRAD_DTYPE = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="Tensor.grad_dtype is new in torch 2.12")
INPUT = torch.linspace(-1, 1, 15).reshape(5, 3)
USES: dict[str, tuple[list[tuple[int, ...]], Callable[..., torch.Tensor]]] = {
    "linear": ([(4, 3), (4,)], lambda w, b: F.linear(INPUT, w, b)),
    "matmul": ([(3, 4)], lambda w: INPUT @ w),
    "used twice": ([(3, 3)], lambda w: F.linear(F.linear(INPUT, w), w)),
    "conv1d": ([(2, 5, 2), (2,)], lambda w, b: F.conv1d(INPUT[None], w, b)),
    "layer_norm": ([(3,), (3,)], lambda w, b: F.layer_norm(INPUT, (3,), w, b)),
    "batch_norm": ([(3,), (3,)], lambda w, b: F.batch_norm(INPUT, torch.zeros(3), torch.ones(3), w, b, True)),
    "mul": ([(3,)], lambda w: INPUT * w),
    "gru_cell": ([(12, 3), (12, 4)], lambda w, u: torch.gru_cell(INPUT, torch.zeros(5, 4), w, u)),
}


def weights_of(use: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(BF16) for shape in USES[use][0]]


@HAS_GRAD_DTYPE
@pytest.mark.parametrize("use", USES)
def test_r13_a_float32_gradient_of_a_bfloat16_weight_is_not_rounded_where_the_weight_is_cast_up(use: str) -> None:
    """It is that of a float32 weight of the same values."""
    run, lists = USES[use][1], hmp.Policy(fp32="linear matmul conv1d layer_norm batch_norm mul gru_cell".split())
    wide = [weight.float().requires_grad_() for weight in weights_of(use)]
    run(*wide).pow(3).sum().backward()
    for is_parameter in (True, False):
        low = [torch.nn.Parameter(w) if is_parameter else w.requires_grad_() for w in weights_of(use)]
        for weight in low:
            weight.grad_dtype = F32
        for _ in range(2):
            for weight in low:
                weight.grad = None
            with hmp.casts(lists):
                run(*low).pow(3).sum().backward()
        assert [w.grad.dtype for w in low] == [F32] * len(low)
        assert all(torch.equal(w.grad, want.grad) for w, want in zip(low, wide, strict=True))
