"""R11 and R7: an error is the user's. What a hook, a custom op, a mode or a tensor's class raises goes through once and unchanged, and its
Python runs once; only torch's own refusal of a dtype is answered by another dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hmp
from oracle import BF16
from saved_oracle import packs

X = torch.linspace(0.1, 1.0, 16).reshape(4, 4)
POLICY = hmp.Policy("mine", bf16={"exp", "matmul", "mul", "norm", "sigmoid", "baddbmm", "tanh"}, fp32={"log"})


def low(*, grad: bool = True) -> torch.Tensor:
    return X.to(BF16).requires_grad_(grad)


# what is cast by the dispatcher, by the wrapper, and not at all; each saves a tensor for backward
SAVING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cast by the dispatcher": lambda x: torch.exp(x),
    "a method": lambda x: x.sigmoid(),
    "cast by the wrapper": lambda x: torch.tanh(input=x),
    "nothing to cast": lambda x: torch.exp(x.detach().to(BF16).requires_grad_()),
    "a product": lambda x: torch.matmul(x, x),
    "to float32": lambda x: torch.log(x),
    "unlisted, a kernel for some arguments": lambda x: torch.linalg.norm(x.flatten(), 1.5),
    "listed, a kernel for some arguments": lambda x: x.norm(1.5),
    "a mixture that torch is asked for": lambda x: torch.cdist(x[None], x[None].detach().to(BF16)),
    "another": lambda x: torch.einsum("ij,jk->ik", x, x.detach().to(BF16)),
}


class Raiser:
    """Raises its error at the first call, lets every later one pass, and counts them."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def __call__(self, value: Any = None, *_: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise self.error
        return value


ERRORS = [
    RuntimeError("\"exp\" not implemented for 'BFloat16'"),
    NotImplementedError("expected scalar type Float but found BFloat16"),
    ValueError("both inputs should have same dtype"),
    torch.OutOfMemoryError("out of memory in bfloat16"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: f"{type(e).__name__} {e}")
def test_r11_what_a_hook_raises_once_the_caller_sees_once(error: Exception) -> None:
    for op, call in SAVING.items():
        raised = type(error)(*error.args)
        hook, leaf = Raiser(raised), X.clone().requires_grad_()
        with hmp.casts(POLICY), torch.autograd.graph.saved_tensors_hooks(hook, lambda t: t), pytest.raises(type(error)) as caught:
            call(leaf)
        assert caught.value is raised and hook.calls == 1, op
        assert raised.__cause__ is None and raised.__context__ is None, op


# what fails in the low-precision dtype for want of a kernel, or is refused as a mixture, as torch says once it is asked
REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a mixture": SAVING["a mixture that torch is asked for"],
    "another": SAVING["another"],
    "a mixture of a product": lambda x: torch.matmul(x.to(BF16), x),
    "no kernel": lambda x: x.to(BF16).norm("nuc"),
    "no kernel, a composite": lambda x: F.interpolate(x.to(BF16)[None, None], scale_factor=2.0, mode="bilinear", antialias=True),
}


@packs  # older releases do not say whose hooks are active
def test_r7_r11_a_refused_call_is_not_tried_again_where_a_hook_is() -> None:
    """The hook may have packed what the op saved before it raised: torch's own error."""
    none = hmp.Policy("none")
    packed: list[torch.dtype] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.dtype)
        return tensor

    for op, call in REFUSED.items():
        found = []
        for around in (contextlib.nullcontext(), hmp.casts(none)):
            packed.clear()
            leaf = X.clone().requires_grad_()
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
            with around, hooks, pytest.raises(RuntimeError, match=r"dtype|scalar type|not implemented for"):
                call(leaf)
            found.append(list(packed))
        assert found[0] == found[1], op
        with hmp.casts(none):
            assert call(X.clone().requires_grad_()).dtype in (BF16, torch.float32), op  # without a hook it runs


# --- custom ops, functions of the user's, callables that torch calls, modes and tensor subclasses --------------------------------


class Mode:
    def __init__(self, name: str, raiser: Raiser) -> None:
        super().__init__()
        self.name, self.raiser = name, raiser


class FunctionMode(Mode, TorchFunctionMode):
    """Lets `raiser` know of each call of a function of this name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == self.name:
            self.raiser()
        return func(*args, **(kwargs or {}))


class DispatchMode(Mode, TorchDispatchMode):
    """The same of an op of ATen's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::" + self.name:
            self.raiser()
        return func(*args, **(kwargs or {}))


class Raising(torch.Tensor):
    """Lets the raiser know of each call of matmul."""

    raiser: ClassVar[Callable[..., None]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "matmul":
            cls.raiser()
        return super().__torch_function__(func, types, args, kwargs or {})


@torch.library.custom_op("hmp_test_errors::raising", mutates_args=())
def raising(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype is BF16
    Raising.raiser()
    return x.clone()


def raising_here(x: torch.Tensor) -> torch.Tensor:
    return raising(x)


NONE, CUSTOM = hmp.Policy("none"), hmp.Policy("custom", bf16={f"{__name__}.raising_here"})
DISTANCE = hmp.Policy("distance", bf16={"triplet_margin_with_distance_loss"})
Who = tuple[hmp.Policy, Any, Callable[[], Any]]  # lists, a mode, and a call that makes somebody call the raiser
WHO: dict[str, Callable[[Raiser], Who]] = {
    "a listed custom op": lambda raiser: (CUSTOM, None, lambda: raising_here(X)),
    "a bf16 function": lambda raiser: (POLICY, None, lambda: hmp.bf16_function(lambda x: raiser(x))(X)),
    "a function that torch calls": lambda raiser: (
        DISTANCE,
        None,
        lambda: F.triplet_margin_with_distance_loss(X, X, X, distance_function=lambda a, b: raiser(a) if a.dtype is BF16 else a),
    ),
    "a mode at an op into out": lambda raiser: (POLICY, DispatchMode("exp", raiser), lambda: torch.exp(X, out=torch.empty(4, 4))),
    "a function mode at a mixture": lambda raiser: (NONE, FunctionMode("matmul", raiser), lambda: torch.matmul(low(grad=False), X)),
    "a dispatch mode at a mixture": lambda raiser: (NONE, DispatchMode("mm", raiser), lambda: torch.matmul(low(grad=False), X)),
}
for mode, at in ((FunctionMode, "exp"), (DispatchMode, "exp"), (DispatchMode, "_to_copy")):
    WHO[f"{mode.__name__} at {at}"] = lambda raiser, mode=mode, at=at: (POLICY, mode(at, raiser), lambda: torch.exp(X))
    WHO[f"{mode.__name__} at {at}, by name"] = lambda raiser, mode=mode, at=at: (POLICY, mode(at, raiser), lambda: torch.exp(input=X))
for lists in (POLICY, NONE):
    WHO[f"a subclass, {lists.name}"] = lambda raiser, lists=lists: (lists, None, lambda: torch.matmul(X.as_subclass(Raising), X.to(BF16)))
TEXTS = "disk full", "not implemented for 'BFloat16'", "expected scalar type Float but found BFloat16", "both inputs should have same dtype"


@pytest.mark.parametrize("text", TEXTS)
def test_r7_r11_what_anybody_raises_once_the_caller_sees_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for who, made in WHO.items():
        raiser = Raiser(RuntimeError(text))
        monkeypatch.setattr(Raising, "raiser", raiser, raising=False)
        policy, mode, call = made(raiser)
        with hmp.casts(policy), mode or contextlib.nullcontext(), pytest.raises(RuntimeError, match=text) as caught:
            call()
        assert raiser.calls == 1, who
        assert caught.value.__context__ is None, who


def test_r7_a_mixture_under_a_mode_raises_torchs_own_error_and_the_mode_sees_it_once() -> None:
    raiser = Raiser(RuntimeError())
    raiser.calls = 1
    with hmp.casts(NONE), DispatchMode("mm", raiser), pytest.raises(RuntimeError, match="same dtype"):
        torch.matmul(low(grad=False), X)
    assert raiser.calls == 2


# --- torch's own errors that are no refusal -------------------------------------------------------------------------------------


@pytest.mark.skipif(not X.is_cpu, reason="an accelerator's allocator has other words")
def test_r11_out_of_memory_is_never_tried_again() -> None:
    large = torch.ones(1, dtype=BF16).expand(2**46)
    with hmp.casts(hmp.Policy("mine", bf16={"sinh"})), torch.profiler.profile() as profile, pytest.raises(RuntimeError, match="allocate"):
        torch.sinh(large)
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::sinh") == 1


def test_r11_an_error_of_torchs_that_is_no_refusal_is_raised_after_one_run() -> None:
    with hmp.casts(POLICY), torch.profiler.profile() as profile:
        with pytest.raises(RuntimeError, match="batch"):
            torch.baddbmm(X[None], X[None].expand(2, 4, 4), X[None].expand(3, 4, 4))
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::baddbmm") == 1
