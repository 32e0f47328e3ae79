"""R19: what a protocol hands out is torch's own function, or equals what the user holds under that name, whenever they took it.

Methods are looked up, replaced and compared as without hmp, and tables that torch fills meanwhile serve it before and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

import hmp
from dispatch_kit import Noted, Noting
from process_kit import alone
from strategies import Tagged
from torch_has import TORCH
from trap_kit import policy, same

LOW, WIDE = torch.bfloat16, torch.float32
A, B = torch.randn(4, 4), torch.randn(4, 4)


class Handled(torch.Tensor):
    """torch's documented pattern, with a table in the class."""

    TABLE: ClassVar[dict[Any, Callable[..., str]]] = {}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.TABLE:
            return cls.TABLE[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("when", ["before", "while"])
def test_r19_a_table_of_functions_is_not_passed_by(when: str) -> None:
    def fill() -> None:
        Handled.TABLE.update({F.linear: lambda *_: "linear", torch.Tensor.mul: lambda *_: "mul", torch.matmul: lambda *_: "matmul"})

    Handled.TABLE.clear()
    if when == "before":
        fill()
    x = A.as_subclass(Handled)
    for _ in range(2):
        with hmp.convert(policy=policy(bf16=["linear", "mul", "matmul"])):
            if when == "while":
                fill()
            assert [F.linear(x, x), x * x, x.mul(x), torch.mul, torch.matmul(x, x)][:3] == ["linear", "mul", "mul"]
            assert torch.matmul(x, x) == "matmul"
            assert len(Handled.TABLE) == 3
        assert [F.linear(x, x), x * x, torch.matmul(x, x)] == ["linear", "mul", "matmul"]


class Seeing(torch.Tensor):
    """Notes what its handler gets, and answers some ops by itself."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "__get__" not in str(func):
            cls.seen.append((getattr(func, "__name__", ""), [a.dtype for a in args if isinstance(a, torch.Tensor)]))
        if func is torch.exp:
            return args[0].dtype
        return super().__torch_function__(func, types, args, kwargs or {})


class Identical(torch.Tensor):
    """Compares with `is`, as torch's per-sample gradients do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return [name for name, of in (("conv2d", F.conv2d), ("linear", F.linear), ("matmul", torch.matmul)) if func is of]


def test_r19_a_handler_outside_the_policy_gets_what_torch_has_under_the_name() -> None:
    x = A.as_subclass(Identical)

    def names() -> list[Any]:
        return [F.conv2d(x, B), F.linear(x, B), torch.matmul(x, B), torch.matmul(B, other=x)]

    expected = [["conv2d"], ["linear"], ["matmul"], ["matmul"]]
    assert names() == expected
    model = hmp.apply(torch.nn.Linear(4, 4), policy(bf16=["linear", "matmul", "conv2d"]))
    assert names() == expected
    hmp.remove(model)


CALLED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a builtin": lambda x: torch.matmul(x, B),
    "a function in Python": lambda x: F.softmax(x, -1),
    "a method": lambda x: x.mm(B),
    "an operator": lambda x: 2.0 / x,
    "in torch.nn": lambda x: F.linear(x, B),
    "an answer of its own": lambda x: torch.exp(x),
    "unlisted": lambda x: torch.cos(x),
    "keywords": lambda x: F.linear(input=x, weight=B),
    "a list": lambda x: torch.cat([x, x]),
}


def test_r19_a_users_mode_inside_a_recording_gets_every_call() -> None:
    with hmp.casts(policy(bf16=["matmul", "add"])), hmp.record(), Noting() as mode:
        torch.matmul(A + B, B)
        torch.exp(A)
    ops = torch.Tensor.add, torch.matmul, torch.exp
    assert [each for each in mode.seen if each in ops] == list(ops)


@pytest.mark.parametrize("dtype", [WIDE, LOW], ids=str)
def test_r19_a_recording_changes_nothing_that_the_users_handlers_see(dtype: torch.dtype) -> None:
    x, found = A.to(dtype).as_subclass(Seeing), []
    for watching in (contextlib.nullcontext, hmp.record):
        Seeing.seen.clear()
        with hmp.casts(policy(bf16=["matmul", "mm", "linear", "truediv", "cat"], fp32=["softmax", "exp"])), watching():
            results = [call(x) for call in CALLED.values()]
        told = [each if isinstance(each, torch.dtype) else (each.dtype, type(each), each.tolist()) for each in results]
        found.append((list(Seeing.seen), told))
    assert found[0] == found[1]


def test_r19_torchs_own_subclasses_know_what_they_are_handed() -> None:
    """Tables of torch's, and comparisons by identity in torch's code."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.utils._expanded_weights.expanded_weights_impl import ExpandedWeight

    q = torch.randn(1, 1, 4, 4)
    weight, images = torch.randn(2, 1, 3, 3), torch.randn(3, 1, 5, 5)
    masked = torch.masked.masked_tensor(A, A > 0)
    attended = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4).tril().bool())
    total = masked.sum()
    with hmp.convert(policy=policy(fp32=["scaled_dot_product_attention", "conv2d", "sum", "add"])):
        if TORCH >= (2, 9):  # torch 2.7's bias refuses every question but attention, that for its dtype too
            same(F.scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(4, 4)), attended)
        expanded = ExpandedWeight(weight.requires_grad_(), 3, "sum")
        F.conv2d(images, expanded).sum().backward()
        same(masked.sum().get_data(), total.get_data())
        same((masked + masked).get_data(), 2 * A)
    torch.testing.assert_close(
        weight.grad_sample, torch.stack([torch.autograd.grad(F.conv2d(i[None], weight).sum(), weight)[0] for i in images])
    )


@pytest.mark.parametrize("kind", [Tagged, Noted])
def test_r19_a_dunder_that_alone_is_listed_casts_though_another_function_is_handed_out(kind: Any) -> None:
    """torch hands out Tensor.add for `__radd__`."""
    with hmp.casts(policy(bf16=["radd"])):
        result = torch.Tensor.__radd__(A.clone().as_subclass(kind), B)
        assert result.dtype is LOW and type(result) is kind
        with Noting():
            assert torch.Tensor.__radd__(A, B).dtype is LOW


def test_r19_an_object_that_is_no_tensor_is_handed_torchs_functions() -> None:
    class Duck:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func, func is torch.matmul, func is F.linear

    before = torch.matmul, F.linear
    with hmp.convert(policy="habana"):
        assert torch.matmul(Duck(), A)[1:] == (True, False)
        assert F.linear(Duck(), A)[1:] == (False, True)
        assert (torch.matmul(Duck(), A)[0], F.linear(Duck(), A)[0]) == before


def test_r19_graphs_of_fx_hold_torchs_own() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.special.expit(torch.matmul(F.linear(x, x), F.gelu(x)).mul(x) + 1)

    def targets() -> list[Any]:
        return [node.target for node in torch.fx.symbolic_trace(Net()).graph.nodes]

    plain = targets()
    with hmp.convert(policy="habana-o2"):
        graph = torch.fx.symbolic_trace(Net())
        traced = targets()
        assert graph(A).dtype is torch.fx.Interpreter(graph).run(A).dtype is WIDE
    assert all(a is b or (isinstance(a, str) and a == b) for a, b in zip(traced, plain, strict=True))
    graph.recompile()
    same(graph(A), Net()(A))


# --- methods of torch.Tensor and its subclasses are looked up, replaced and compared as without hmp


@pytest.mark.parametrize("attribute", ["mul", "__setitem__"])
def test_r19_methods_of_a_class_are_its_own(attribute: str) -> None:
    class Own(torch.Tensor):
        mul = __eq__ = softmax = __setitem__ = lambda self, *args: "own"  # type: ignore[assignment]

    class Heir(Own):
        pass

    with hmp.convert(policy=policy(bf16=["mul", "setitem", "softmax", "eq"])):
        assert getattr(Heir, attribute) is getattr(Own, attribute) is vars(Own)[attribute]
        assert getattr(torch.nn.Parameter, attribute) is getattr(torch.Tensor, attribute)
        assert getattr(torch._C.TensorBase, attribute) == getattr(torch.Tensor, attribute)
        assert getattr(A.as_subclass(Heir), attribute)(1, 2) == "own"
        Heir.mul = Heir.__eq__ = Heir.softmax = Heir.__setitem__ = "heir's"  # type: ignore[assignment, method-assign]
        assert vars(Heir)[attribute] == getattr(Heir, attribute) == "heir's"
        delattr(Heir, attribute)
        assert getattr(Heir, attribute) is vars(Own)[attribute]
        with pytest.raises(AttributeError, match=attribute):
            delattr(Heir, attribute)


# --- tables of torch's, filled before, while, and after torch is patched


USE = """
import torch, hmp

def function(x):
    return torch.matmul(torch.nn.functional.gelu(x), x) + torch.ones(2, 2)

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x @ x)

def use():
    global torch
    x = torch.ones(2, 2)
    with torch.device("meta"):
        assert torch.ones(2).device.type == torch.arange(2).device.type == torch.eye(2).device.type == "meta"
    torch.set_default_device("meta")
    assert torch.full((2,), 1.0).device.type == torch.empty(2).device.type == "meta"
    torch.set_default_device(None)
    torch.overrides.get_overridable_functions(), torch.overrides.get_testing_overrides()
    torch.overrides.resolve_name(torch.matmul), torch.overrides.is_tensor_method_or_property(torch.Tensor.mul)
    torch.jit.script(function)(x), torch.jit.trace(function, (x,))(x)
    torch.fx.Interpreter(torch.fx.symbolic_trace(Model())).run(x)
    torch.compile(function, backend="aot_eager")(x)
    torch.export.export(Model(), (x,))
    import torch.fx.experimental.proxy_tensor as proxy_tensor
    proxy_tensor.make_fx(function)(x)
    import torch.distributed.tensor, torch.distributed._shard.sharded_tensor, torch.distributed.fsdp
    import torch.ao.quantization.quantize_fx
    import torch.nn.utils._expanded_weights
"""


@pytest.mark.slow  # imports and compiles much of torch
def test_r19_tables_that_torch_fills_meanwhile_serve_it_before_and_after(tmp_path: Path) -> None:
    convert = "hmp.convert(policy=hmp.Policy('star', bf16=['*']))"
    look = (
        "assert not [f for each in torch.overrides.get_overridable_functions().values() for f in each if type(f).__module__[:3] == 'hmp']"
    )
    alone(tmp_path, "\n".join((USE, "use()", convert, look, "use()", "hmp.revert()", "use()", look)))
    alone(tmp_path, "\n".join((USE, convert, "use()", "hmp.revert()", "use()")))
