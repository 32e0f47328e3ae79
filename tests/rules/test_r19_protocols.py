"""R19: what a protocol hands out is torch's own function, or equals what the user holds under that name, whenever they took it.

Methods are looked up, replaced and compared as without hmp, and no table of torch's holds a wrapper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import hmp
from process_kit import alone
from torch_has import TORCH
from trap_kit import policy, same

LOW, WIDE = torch.bfloat16, torch.float32
A, B = torch.randn(4, 4), torch.randn(4, 4)
Function = Callable[..., Any]


HANDED: list[Function] = []


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        HANDED.append(func)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        HANDED.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


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


class SeeingMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "__get__" not in str(func):
            Seeing.seen.append((getattr(func, "__name__", ""), [a.dtype for a in args if isinstance(a, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


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


@given(st.sampled_from(sorted(CALLED)), st.sampled_from([WIDE, LOW]), st.sampled_from(["class", "mode", "both"]))
def test_r19_a_recording_changes_nothing_that_the_users_handlers_see(name: str, dtype: torch.dtype, who: str) -> None:
    x = A.to(dtype).as_subclass(Seeing) if who != "mode" else A.to(dtype)
    found = []
    for watching in (contextlib.nullcontext, hmp.record):
        Seeing.seen.clear()
        with contextlib.ExitStack() as stack:
            stack.enter_context(hmp.casts(policy(bf16=["matmul", "mm", "linear", "truediv", "cat"], fp32=["softmax", "exp"])))
            if who != "class":
                stack.enter_context(SeeingMode())
            stack.enter_context(watching())
            result = CALLED[name](x)
        found.append((list(Seeing.seen), result if isinstance(result, torch.dtype) else (result.dtype, type(result), result.tolist())))
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


def test_r19_what_equals_torchs_function_casts() -> None:
    with hmp.convert(policy=policy(bf16=["matmul", "mul", "eq"])):
        with Mode():
            torch.matmul(A, B)
        handed = torch.matmul
        assert torch.matmul(A, B).dtype is handed(input=A, other=B).dtype is LOW
        assert torch.Tensor.mul(A, B).dtype is LOW
        same(torch.matmul(A, B), torch.mm(A.to(LOW), B.to(LOW)))

        class Holder:
            function, method = torch.matmul, torch.Tensor.mul

        assert Holder().function(A, B).dtype is LOW  # a builtin takes no self
        with hmp.disable_casts():
            assert handed(A, B).dtype is WIDE
    assert handed(A, B).dtype is WIDE
    assert handed == torch.matmul


class Inheriting(torch.Tensor):
    """Has torch's own `__torch_function__`."""


@pytest.mark.parametrize("kind", [Inheriting, Subclass])
def test_r19_a_dunder_that_alone_is_listed_casts_though_another_function_is_handed_out(kind: Any) -> None:
    """torch hands out Tensor.add for `__radd__`."""
    with hmp.casts(policy(bf16=["radd"])):
        result = torch.Tensor.__radd__(A.clone().as_subclass(kind), B)
        assert result.dtype is LOW and type(result) is kind
        with Mode():
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


def test_r19_classes_are_compared_as_before() -> None:
    """A metaclass that is made while torch is patched inherits what stands in that of torch.Tensor."""
    with hmp.convert(policy="habana"):
        meta = type("Meta", (type(torch.Tensor),), {})
        cls = meta("Cls", (torch.Tensor,), {})
        assert cls != torch.Tensor and cls == cls and cls != 1 and hash(cls) == hash(cls)
        assert {cls: 1}[cls] == 1 and cls in [torch.Tensor, cls]
        assert (torch.Tensor | None) is not None and (cls | None) is not None
        with pytest.raises(TypeError):
            assert cls < torch.Tensor


# --- no table that torch filled before holds a PatchedOp, and one that it fills later finds it as it finds torch's own function


USE = """
import gc, sys, torch, hmp

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

LOOK = """
from torch_walk import held_by_anything, held_by_torch

def is_wrapper(value):
    return issubclass(type(value), WRAPPER)

# where names are looked up, PatchedOps are found on purpose; and Dynamo has to know them. A set finds one by the function and the other
# way round (see test_p6): it may have been filled at any time
def is_meant(holder):
    return type(holder) in (set, frozenset) or id(holder) in ALLOWED

def look():
    global WRAPPER, ALLOWED
    WRAPPER = [kind for kind in type(torch.mm).__mro__ if kind.__module__.partition(".")[0] == "hmp"][-1]
    allowed = [torch.Tensor, vars(torch._VF), *(vars(each) for each in list(sys.modules.values()) if hasattr(each, "__dict__"))]
    allowed += [vars(getattr(torch._C, name)) for name in ('_nn', '_linalg', '_special', '_fft', '_sparse')]
    if "torch._dynamo.trace_rules" in sys.modules:
        allowed.append(sys.modules["torch._dynamo.trace_rules"].get_torch_obj_rule_map())
    # a dict that a type written in C does not let anybody see
    allowed += [next(d for d in gc.get_referents(vars(t)) if type(d) is dict) for t in (torch.Tensor,)]
    ALLOWED = {*map(id, allowed)}
    found = list(held_by_torch(is_wrapper))
    assert len(found) > 40  # it sees them
    told = [(where, value.__name__) for where, holder, value in found if not is_meant(holder)]
    assert told == [], told
    gc.collect()
    others = [(where, value.__name__) for where, holder, value in held_by_anything(is_wrapper, "hmp") if not is_meant(holder)]
    # what hmp remembers of each patch
    others = [each for each in others if each[0] != "tuple"]
    assert others == [], others
"""


@pytest.mark.slow  # imports and compiles much of torch
@pytest.mark.parametrize("when", ["before", "after"])
def test_r19_tables_of_all_of_torch_find_its_functions(tmp_path: Path, when: str) -> None:
    convert = "hmp.convert(policy=hmp.Policy('star', bf16=['*']))"
    alone(
        tmp_path,
        "\n".join((USE, LOOK, *(["use()", convert, "look()"] if when == "before" else [convert, "use()", "hmp.revert()", "use()"]))),
    )
