"""R7: an op of a library with an autocast kernel of its own gets what that kernel asks for, as under torch.autocast."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import same

LOW, WIDE = torch.bfloat16, torch.float32
numbers = itertools.count()
Op = Callable[..., torch.Tensor]


class Library:
    """A library with ops that refuse inputs of another dtype than one, and autocast kernels that cast to it."""

    def __init__(self) -> None:
        self.name = f"hmp_library_{next(numbers)}"
        self.library = torch.library.Library(self.name, "DEF")

    def ops(self) -> types.SimpleNamespace:
        return getattr(torch.ops, self.name)

    def define(self, name: str, *, taking: torch.dtype = WIDE) -> None:
        self.library.define(f"{name}(Tensor a, Tensor b) -> Tensor")

        def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            assert {a.dtype, b.dtype} == {taking}, f"the kernel got {a.dtype} and {b.dtype}"
            return a + b

        self.library.impl(name, kernel, "CompositeImplicitAutograd")

    def autocast_by_register(self, name: str, dtype: torch.dtype = WIDE) -> None:
        torch.library.register_autocast(f"{self.name}::{name}", "cpu", dtype)

    def autocast_by_kernel(self, name: str, dtype: torch.dtype = WIDE) -> None:
        """As torchvision's in C++ do."""

        def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            with (
                torch.autocast("cpu", enabled=False),
                torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)),
            ):
                return getattr(self.ops(), name)(a.to(dtype), b.to(dtype))

        self.library.impl(name, kernel, "AutocastCPU")


@pytest.fixture
def library() -> Iterator[Library]:
    made = Library()
    yield made
    made.library._destroy()


def low() -> torch.Tensor:
    """A product of the policy's, with the gradient that a training step needs."""
    return F.linear(torch.eye(2, requires_grad=True), torch.eye(2))


WAYS: dict[str, Callable[[Library, str], Op]] = {
    "packet": lambda library, name: lambda *args: getattr(library.ops(), name)(*args),
    "overload": lambda library, name: lambda *args: getattr(library.ops(), name).default(*args),
    "a packet that was taken before": lambda library, name: getattr(library.ops(), name),
    "an overload that was taken before": lambda library, name: getattr(library.ops(), name).default,
    "by keyword": lambda library, name: lambda a, b: getattr(library.ops(), name)(b=b, a=a),
}
REGISTERED = {"register_autocast": Library.autocast_by_register, "AutocastCPU": Library.autocast_by_kernel}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("registered", REGISTERED)
@pytest.mark.parametrize("way", WAYS)
def test_r7_the_kernel_gets_the_dtype_that_it_asks_for(library: Library, way: str, registered: str, when: str) -> None:
    library.define("op")
    if when == "before":
        REGISTERED[registered](library, "op")
    op = WAYS[way](library, "op")
    with hmp.casts("torch-cpu"):
        if when == "after":
            REGISTERED[registered](library, "op")
        x = low()
        assert x.dtype is LOW
        result = op(x, torch.ones(2, 2))
        assert result.dtype is WIDE
        result.sum().backward()
        assert F.linear(torch.eye(2), torch.eye(2)).dtype is LOW
        with hmp.disable_casts(), pytest.raises(AssertionError, match="the kernel got"):
            op(x.detach(), torch.ones(2, 2))
    assert not torch.is_autocast_enabled("cpu")


def test_r7_a_kernel_that_asks_for_the_low_dtype_gets_the_policys(library: Library) -> None:
    library.define("op", taking=torch.float16)
    library.autocast_by_register("op", torch.float16)
    with hmp.casts(hmp.Policy("half", dtype=torch.float16, bf16={"linear"})):
        assert library.ops().op(low(), torch.ones(2, 2)).dtype is torch.float16


@pytest.mark.usefixtures("unpatched")
def test_r7_ops_of_libraries_are_their_own_after_revert_and_all_others_throughout(library: Library) -> None:
    library.define("with_kernel")
    library.define("without")
    library.autocast_by_register("with_kernel")
    ops = library.ops()
    before = {op: (op._op, op.default._op, hash(op), hash(op.default)) for op in (ops.with_kernel, ops.without, torch.ops.aten.mm)}
    with hmp.convert(policy="torch-cpu"):
        assert (hash(ops.with_kernel), hash(ops.with_kernel.default)) == before[ops.with_kernel][2:]
        assert all(op._op is before[op][0] and op.default._op is before[op][1] for op in (ops.without, torch.ops.aten.mm))
        with pytest.raises(AssertionError, match="the kernel got"):
            ops.without(low(), torch.ones(2, 2))
    after = {op: (op._op, op.default._op, hash(op), hash(op.default)) for op in before}
    assert after == before and all(a is b for op in before for a, b in zip(after[op][:2], before[op][:2], strict=True))


@pytest.mark.native_kernels
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["autocast_by_register", "autocast_by_kernel"])
def test_r7_such_an_op_inside_one_compiled_graph(library: Library, way: str, backend: str) -> None:
    for name, dtype in (("wide", WIDE), ("narrow", LOW)):
        library.define(name, taking=dtype)
        getattr(library, way)(name, dtype)
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = F.linear(x, weight)
        return library.ops().wide(hidden, weight), library.ops().narrow.default(b=x, a=weight), hidden

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    hidden = F.linear(x.to(LOW), weight.to(LOW))
    expected = hidden.float() + weight, weight.to(LOW) + x.to(LOW), hidden
    (gradient,) = torch.autograd.grad(sum(each.float().sum() for each in expected), weight)
    for around in (hmp.casts("torch-cpu"), torch.autocast("cpu", LOW)):
        with around:
            found = compiled(x)
        same(found, expected)
        assert torch.equal(torch.autograd.grad(sum(each.float().sum() for each in found), weight)[0], gradient)
    with hmp.casts("torch-cpu"), hmp.disable_casts(), pytest.raises(Exception, match="the kernel got"):
        compiled(x)  # without casts `narrow` is given float32
