"""R11 and R7: an error is the user's. What a hook, a custom op, a mode or a tensor's class raises goes through once and unchanged, and its
Python runs once; only torch's own refusal of a dtype is answered by another dtype."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hmp
from oracle import BF16, F32

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


class Once:
    """Raises `error` at its first call, and lets every later one pass."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            raise self.error
        return tensor


ERRORS = [
    RuntimeError("disk full"),
    RuntimeError("\"exp\" not implemented for 'BFloat16'"),
    NotImplementedError("expected scalar type Float but found BFloat16"),
    ValueError("both inputs should have same dtype"),
    TypeError("dtype"),
    AttributeError("dtype"),
    torch.OutOfMemoryError("out of memory in bfloat16"),
]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: f"{type(e).__name__} {e}")
@pytest.mark.parametrize("op", SAVING)
def test_r11_what_a_hook_raises_once_the_caller_sees_once(op: str, error: Exception) -> None:
    error = type(error)(*error.args)
    hook = Once(error)
    leaf = X.clone().requires_grad_()
    with hmp.casts(POLICY), torch.autograd.graph.saved_tensors_hooks(hook, lambda t: t):
        with pytest.raises(type(error)) as caught:
            SAVING[op](leaf)
    assert caught.value is error
    assert hook.calls == 1
    assert error.__cause__ is None and error.__context__ is None
    frames = {entry.frame.code.name for entry in caught.traceback}
    assert frames.isdisjoint({"again", "retry", "failed", "learning"}), "the traceback is that of the call"


# what fails in the low dtype, is refused as a mixture, or works
COUNTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **SAVING,
    "no kernel, known": lambda x: torch.linalg.inv(x.to(BF16)),
    "no kernel, by trial": lambda x: x.to(BF16).norm("nuc"),
    "no kernel, by trial, a composite": lambda x: F.interpolate(x.to(BF16)[None, None], scale_factor=2.0, mode="bilinear", antialias=True),
    "a product in a mixture": lambda x: torch.einsum("ij,jk->ik", x.to(BF16), x),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", COUNTED)
def test_r11_a_hook_is_called_for_each_tensor_that_the_op_saves_and_for_no_other(op: str) -> None:
    """A checkpoint counts them: what backward asks for is what a hook must have packed, in that order."""
    packed: list[int] = []
    unpacked: list[int] = []

    def pack(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        packed.append(len(packed))
        return packed[-1], tensor

    def unpack(found: tuple[int, torch.Tensor]) -> torch.Tensor:
        unpacked.append(found[0])
        return found[1]

    with hmp.casts(POLICY):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = COUNTED[op](X.clone().requires_grad_())
        result.float().sum().backward()
    assert sorted(set(unpacked)) == packed


def test_r7_a_mixture_that_is_refused_after_packing_is_not_tried_where_a_hook_is() -> None:
    """torch's product of two dtypes packs, and is refused then: R7 does not try it where a hook sees that."""
    packed: list[torch.dtype] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.dtype)
        return tensor

    with hmp.casts(hmp.Policy("none")):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), pytest.raises(RuntimeError, match=r"same dtype|expected"):
            torch.ops.aten.mm(low(), X)  # torch alone: it packs, then refuses
    plain = len(packed)
    packed.clear()
    assert plain > 0
    with hmp.casts(hmp.Policy("mine", bf16={"exp"})), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = torch.matmul(low(), X.clone().requires_grad_())  # R7: one dtype, and no run before that packs
    assert result.dtype is BF16
    assert packed == [BF16, BF16]


def test_r11_a_hook_that_is_no_python_function_is_called_once() -> None:
    calls: list[int] = []

    class Place:
        def __index__(self) -> int:
            calls.append(1)
            return 99

    # an IndexError would be torch's own to see; the hook itself is C code, and no frame of Python's tells of it
    with hmp.casts(POLICY), torch.autograd.graph.saved_tensors_hooks(operator.itemgetter(Place()), lambda t: t):
        with pytest.raises((IndexError, RuntimeError)):
            torch.exp(X.clone().requires_grad_())
    assert len(calls) == 1


# --- custom ops, functions of the user's, callables that torch calls --------------------------------------------------------


@torch.library.custom_op("hmp_test_errors::raising", mutates_args=())
def raising(x: torch.Tensor) -> torch.Tensor:
    raising_calls.append(x.dtype)
    raise RuntimeError("\"raising\" not implemented for 'BFloat16'" if refusing else "disk full")


raising_calls: list[torch.dtype] = []
refusing = False


@pytest.mark.parametrize("text_of_a_refusal", [False, True])
def test_r11_a_custom_op_that_is_listed_raises_once(text_of_a_refusal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "refusing", text_of_a_refusal)
    raising_calls.clear()
    policy = hmp.Policy("mine", bf16={f"{__name__}.raising_here"})
    with hmp.casts(policy), pytest.raises(RuntimeError, match=r"disk full|not implemented") as caught:
        raising_here(X)
    assert raising_calls == [BF16]
    assert caught.value.__context__ is None


def raising_here(x: torch.Tensor) -> torch.Tensor:
    return raising(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["disk full", "not implemented for 'BFloat16'"])
@pytest.mark.parametrize("cast", ["bf16", "fp32", "promote"])
def test_r11_a_registered_function_raises_once(cast: str, text: str) -> None:
    calls: list[torch.dtype] = []
    decorate = {"bf16": hmp.bf16_function, "fp32": hmp.fp32_function, "promote": hmp.promote_function}[cast]

    @decorate
    def mine(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.dtype)
        raise RuntimeError(text)

    with hmp.casts("habana"), pytest.raises(RuntimeError, match=text):
        mine(X)
    assert len(calls) == 1


@pytest.mark.parametrize("text", ["disk full", "expected scalar type Float but found BFloat16"])
def test_r11_a_function_that_torch_calls_raises_once(text: str) -> None:
    calls: list[torch.dtype] = []

    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(a.dtype)
        raise RuntimeError(text)

    policy = hmp.Policy("mine", bf16={"triplet_margin_with_distance_loss"})
    with hmp.casts(policy), pytest.raises(RuntimeError, match=text):
        F.triplet_margin_with_distance_loss(X, X, X, distance_function=distance)
    assert calls == [BF16]


# --- modes and tensor subclasses ------------------------------------------------------------------------------------------------


class RaisingFunctionMode(TorchFunctionMode):
    """Raises at the first call of a function of this name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__()
        self.name, self.text, self.calls = name, text, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == self.name:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError(self.text)
        return func(*args, **(kwargs or {}))


class RaisingDispatchMode(TorchDispatchMode):
    """Raises at the first call of an op of ATen of this name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__()
        self.name, self.text, self.calls = name, text, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::" + self.name:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError(self.text)
        return func(*args, **(kwargs or {}))


MODES = {"function": (RaisingFunctionMode, "bfloat16"), "dispatch": (RaisingDispatchMode, "_to_copy")}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", ["disk full", "not implemented for 'BFloat16'"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", ["the op", "the cast"])
@pytest.mark.parametrize("call", ["dispatcher", "wrapper"])
def test_r11_what_a_mode_raises_once_the_caller_sees_once(call: str, at: str, mode: str, text: str) -> None:
    make, cast = MODES[mode]
    raising = make("exp" if at == "the op" else cast, text)
    with hmp.casts(POLICY), raising, pytest.raises(RuntimeError, match=text):
        torch.exp(X) if call == "dispatcher" else torch.exp(input=X)
    assert raising.calls == 1


@pytest.mark.parametrize("text", ["disk full", "both inputs should have same dtype"])
@pytest.mark.parametrize("mode", ["function", "dispatch"])
def test_r7_what_a_mode_raises_at_a_mixture_the_caller_sees_once(mode: str, text: str) -> None:
    raising = RaisingFunctionMode("matmul", text) if mode == "function" else RaisingDispatchMode("mm", text)
    with hmp.casts(hmp.Policy("none")), raising, pytest.raises(RuntimeError, match=text):
        torch.matmul(low(grad=False), X)
    assert raising.calls == 1


def test_r7_a_mixture_under_a_mode_gets_one_dtype_and_the_mode_sees_it_once() -> None:
    with hmp.casts(hmp.Policy("none")), RaisingDispatchMode("", "") as mode:
        mode.name, mode.calls = "mm", 1
        assert torch.matmul(low(grad=False), X).dtype is BF16
        assert mode.calls == 2


class Raising(torch.Tensor):
    """Raises at the first call of exp."""

    calls: ClassVar[list[str]] = []
    text = "disk full"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("exp", "matmul"):
            cls.calls.append(func.__name__)
            if len(cls.calls) == 1:
                raise RuntimeError(cls.text)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["disk full", "not implemented for 'BFloat16'"])
@pytest.mark.parametrize("op", [lambda x: torch.exp(x), lambda x: torch.matmul(x, X.to(BF16))], ids=["exp", "matmul"])
@pytest.mark.parametrize("policy", [POLICY, hmp.Policy("none")], ids=["listed", "unlisted"])
def test_r11_what_a_tensor_subclass_raises_once_the_caller_sees_once(policy: hmp.Policy, op: Any, text: str) -> None:
    Raising.calls, Raising.text = [], text
    with hmp.casts(policy), pytest.raises(RuntimeError, match=text):
        op(X.as_subclass(Raising))
    assert len(Raising.calls) == 1


# --- torch's own errors that are no refusal -------------------------------------------------------------------------------------


def test_r11_a_passing_trouble_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What raises once and would work the second time is an error all the same."""
    runs: list[torch.dtype] = []
    plain = torch.sinh

    def once(x: torch.Tensor, *args: object) -> torch.Tensor:
        runs.append(x.dtype)
        if len(runs) == 1:
            raise RuntimeError("CUDA error: initialization error")
        return plain(x)

    monkeypatch.setattr(torch, "sinh", once)
    with hmp.casts(hmp.Policy("mine", bf16={"sinh"})), pytest.raises(RuntimeError, match="initialization error"):
        torch.sinh(X)
    assert runs == [BF16]


def test_r11_an_error_of_torchs_that_is_no_refusal_is_raised_after_one_run() -> None:
    with hmp.casts(POLICY), torch.profiler.profile() as profile:
        with pytest.raises(RuntimeError, match="batch"):
            torch.baddbmm(X[None], X[None].expand(2, 4, 4), X[None].expand(3, 4, 4))
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::baddbmm") == 1


def test_r11_out_is_not_tried_again_for_an_error_that_is_the_users() -> None:
    out = torch.empty(4, 4, dtype=F32)
    mode = RaisingDispatchMode("exp", "not implemented for 'BFloat16'")
    with hmp.casts(POLICY), mode, pytest.raises(RuntimeError, match="not implemented"):
        torch.exp(X, out=out)
    assert mode.calls == 1
