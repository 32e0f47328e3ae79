"""R11, "No instructions", beside what else decides or looks: regions, classes of tensors, compilers, tools."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import hmp
from no_instructions_kit import Kernels, all_same, attention, by_hand, gradients, listed, random
from oracle import BF16, F16, F32
from process_kit import run_in_another_process
from saved_oracle import packs
from strategies import Tagged
from trap_kit import policy, same

pytestmark = pytest.mark.usefixtures("no_instructions")


# --- who has the word


def test_r11_disable_casts_and_native_leave_products_to_torchs_kernel() -> None:
    x = random(8, 16, dtype=BF16, grad=False)
    with hmp.casts(listed()):
        for inside, wanted in (
            (contextlib.nullcontext(), F32),
            (hmp.disable_casts(), BF16),
            (torch.autocast("cpu", enabled=False), BF16),  # R17: as disable_casts()
            (hmp.casts(policy(fp32=["mm"])), F32),
        ):
            with inside, Kernels() as kernels:
                torch.mm(x, x.t())
            assert kernels.dtypes == {wanted}
        assert hmp.set_low_kernels("native") == "float32"
        with Kernels() as kernels:
            torch.mm(x, x.t())
        assert kernels.dtypes == {BF16}
        assert hmp.set_low_kernels("float32") == "native"
        with Kernels() as kernels:
            torch.mm(x, x.t())
        assert kernels.dtypes == {F32}
    with Kernels() as kernels:  # no policy is in force
        torch.mm(x, x.t())
    assert kernels.dtypes == {BF16}


def test_r11_a_region_of_torch_autocast_inside_has_the_last_word() -> None:
    """R17: the results have the dtype of the region."""
    x, w = random(8, 16), random(16, 16)
    for lists, dtype, has in itertools.product((listed(), policy(), "torch-cpu"), (BF16, F16), (F32, BF16)):
        with hmp.casts(lists), torch.autocast("cpu", dtype=dtype):
            found = F.linear(x.to(has), w.to(has))
            assert torch.mm(x.to(has), w.to(has)).dtype is found.dtype is dtype
        all_same([g.dtype for g in gradients(found, [x, w])], [F32, F32])
    with torch.autocast("cpu", dtype=F16), hmp.casts(listed()):
        same(F.linear(x, w), by_hand(F.linear)(x, w))


@pytest.mark.usefixtures("unpatched")
def test_r11_a_wrong_value_names_the_three_and_patches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = torch.mm, torch.Tensor.matmul, F.linear
    monkeypatch.setenv("HMP_LOW_KERNELS", "fast")
    for use in (hmp.convert, lambda: hmp.casts("habana").__enter__(), lambda: hmp.set_low_kernels("float32")):
        with pytest.raises(hmp.HmpError) as caught:
            use()
        assert all(repr(each) in str(caught.value) for each in ("auto", "native", "float32", "fast"))
    assert (torch.mm, torch.Tensor.matmul, F.linear) == names and not hmp.is_converted()
    monkeypatch.setenv("HMP_LOW_KERNELS", "")
    with pytest.raises(hmp.HmpError, match="'fast'"):
        hmp.set_low_kernels("fast")
    assert [hmp.set_low_kernels(each) for each in ("native", "float32", "auto")] == ["auto", "native", "float32"]


# --- classes and layouts


class Wrapped(torch.Tensor):
    """A wrapper subclass that hands every op on to the tensor that it holds."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, requires_grad=requires_grad
        )

    def __init__(self, inner: torch.Tensor, requires_grad: bool = False) -> None:
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        return pytree.tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


class Handles(torch.Tensor):
    """A subclass with a `__torch_function__` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Wrapped, Handles, Tagged], ids=lambda k: k.__name__)
def test_r11_subclasses_get_the_numbers_of_plain_tensors(kind: Any) -> None:
    for shape, dtype in itertools.product(((2, 36, 64), (3, 64)), (F32, BF16)):
        x, w = random(*shape, dtype=dtype), random(70, 64, dtype=dtype)
        of = [Wrapped(x, True), Wrapped(w, True)] if kind is Wrapped else [x.detach().as_subclass(kind).requires_grad_(), w]
        with hmp.casts(listed()):
            end = F.linear(*of)
        expected = by_hand(F.linear)(x, w)
        weights = torch.linspace(-1.0, 1.5, end.numel()).reshape(end.shape).to(BF16)
        got = torch.autograd.grad(end, of, Wrapped(weights) if kind is Wrapped else weights)
        all_same([_plain(end.detach()), *map(_plain, got)], [expected, *gradients(expected, [x, w])])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, Wrapped) else tensor.as_subclass(torch.Tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_r11_nested_tensors_compute_in_float32() -> None:
    parts, w = [random(n, 64, grad=False, seed=n) for n in (30, 50)], random(70, 64)
    expected = by_hand(F.linear)(torch.cat(parts), w)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
        with hmp.casts(listed()):
            found = torch.cat(F.linear(nested, w).unbind())
        same(found, expected)
        all_same(gradients(found, [w]), gradients(expected, [w], retain_graph=True))


@packs  # else no call that needs a gradient is tried again in float32
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_r11_sparse_operands() -> None:
    """COO computes in float32 and is rounded; for CSR the CPU has no low-precision kernel: R11's first half."""
    dense = random(9, 16, grad=False) * (random(9, 16, grad=False, seed=1) > 0)
    other = random(16, 7)
    for call in (lambda a, b: torch.mm(a, b), lambda a, b: torch.sparse.mm(a, b), lambda a, b: a @ b):
        expected = by_hand(lambda b, call=call: call(dense.to(BF16).float().to_sparse(), b))(other)
        with hmp.casts(policy(bf16=["mm", "sparse.mm", "matmul"])):
            found = call(dense.to_sparse(), other)
            rows = call(dense.to(BF16).to_sparse_csr(), other)
        same(found, expected)
        all_same(gradients(found, [other]), gradients(expected, [other]))
        assert rows.dtype is F32
    squares = random(6, 6, grad=False).to_sparse(), random(6, 6, grad=False).to_sparse_csr()
    for call in (lambda: torch.sparse.mm(squares[0], squares[0]), lambda: torch.sparse.mm(squares[1], other[:6], "sum")):
        with hmp.casts("torch-cpu"):  # which torch.autocast does not reach
            found = call()
        assert found.dtype is F32
        all_same(found.detach().to_dense(), call().detach().to_dense())


def test_r11_fake_tensors_have_the_dtypes_of_others() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.randn(2, 64, 4, 32, requires_grad=True)
    with hmp.casts(listed()):  # outside of the mode
        end = torch.matmul(q.transpose(1, 2), q.permute(0, 2, 3, 1))
        attended = attention(q, q, q)
    for each in (end, attended):
        assert each.dtype is BF16
        (gradient,) = torch.autograd.grad(each.float().sum(), q)
        assert gradient.dtype is F32


@pytest.mark.slow
def test_r11_dtensors_compute_in_float32() -> None:
    said = run_in_another_process(
        """
        import torch.distributed as dist
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        hmp.set_low_kernels("float32")
        lists = hmp.Policy("mine", bf16={"linear", "matmul"})
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((2, 36, 64), (80, 64)):
                for placement in (Replicate(), Shard(0)):
                    x, w = torch.randn(shape).to(dtype), torch.randn(70, 64).to(dtype)
                    of = [distribute_tensor(x, mesh, [placement]), distribute_tensor(w, mesh, [Replicate()])]
                    of = [each.requires_grad_() for each in of]
                    with hmp.casts(lists):
                        end = F.linear(*of)
                    got = torch.autograd.grad(end, of, distribute_tensor(torch.ones_like(end.full_tensor()), mesh, [placement]))
                    plain = [x.requires_grad_(), w.requires_grad_()]
                    wide = F.linear(*(t.bfloat16().float() for t in plain)).bfloat16()
                    wanted = torch.autograd.grad(wide, plain, torch.ones_like(wide))
                    found = [end.full_tensor(), *(g.full_tensor() for g in got)]
                    print(all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(found, [wide, *wanted])))
        """
    )
    assert said.split() == ["True"] * 8


# --- compiled, traced, exported


def step(x: torch.Tensor, w: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, ...]:
    attended = F.scaled_dot_product_attention(x, x, x)
    mixed = torch.einsum("bhsd,de->bhse", attended, w) @ w.t()
    into = low.clone()
    into.addmm_(low, low)
    return mixed, mixed.float().sum(-1), into


def step_by_hand(x: torch.Tensor, w: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, ...]:
    attended = by_hand(F.scaled_dot_product_attention)(x, x, x)
    mixed = by_hand(torch.matmul)(by_hand(lambda a, b: torch.einsum("bhsd,de->bhse", a, b))(attended, w), w.t())
    return mixed, mixed.float().sum(-1), by_hand(torch.addmm)(low, low, low)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_r11_compiled_code_computes_what_eager_code_does(backend: str, fresh_compiler: None) -> None:
    """fullgraph; and it follows set_low_kernels(), and weights that are written between calls."""
    x, w, low = random(1, 2, 6, 8), random(8, 8), random(5, 5, dtype=BF16, grad=False)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    expected = step_by_hand(x, w, low)
    with hmp.casts(listed()):
        found = compiled(x, w, low)
    all_same(list(found), list(expected))
    all_same(gradients(found[1], [x, w]), gradients(expected[1], [x, w]))
    layer = torch.nn.Linear(24, 24)
    model, given = torch.compile(layer, backend=backend, fullgraph=True), random(8, 24, grad=False)
    with torch.no_grad(), hmp.casts(listed()):
        for _ in range(3):
            same(model(given), by_hand(F.linear)(given, layer.weight, layer.bias))
            layer.weight.mul_(1.5)
        hmp.set_low_kernels("native")
        with Kernels() as kernels:
            layer(given)
        native = layer(given)
        assert kernels.dtypes == {BF16}
        same(model(given), native)
        hmp.set_low_kernels("float32")
        same(model(given), by_hand(F.linear)(given, layer.weight, layer.bias))
    with torch.inference_mode(), hmp.casts(listed()):
        same(model(given), by_hand(F.linear)(given, layer.weight, layer.bias))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_r11_a_traced_model_computes_in_float32_and_follows_its_weights() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.ReLU(), torch.nn.Linear(24, 4)), random(8, 24, grad=False)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), hmp.casts(listed()):
            for _ in range(3):
                expected = model(x)
            traced = torch.jit.trace(model, (x,))
        same(traced(x), expected)
        with torch.no_grad():
            model[0].weight.mul_(2)
            with hmp.casts(listed()):
                same(traced(x), model(x))


class Attends(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.recurrent = torch.nn.Linear(64, 64), torch.nn.GRU(64, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x)[:, None]
        return self.recurrent(attention(q, q, q)[:, 0])[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_r11_a_traced_model_holds_ops_alone() -> None:
    model, x = Attends(), random(2, 40, 64)
    with hmp.casts(listed()):
        expected = model(x)
        traced = torch.jit.trace(model, (x,))
    assert "Python" not in str(traced.inlined_graph)  # a PythonOp cannot be saved
    found = traced(x)
    same(found, expected)
    # a tensor that stands in a call three times has three low-precision gradients, which a trace adds up in another order
    torch.testing.assert_close(gradients(found, [x])[0], gradients(expected, [x])[0], rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_r11_an_exported_model_computes_in_float32(fresh_compiler: None) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), random(8, 24, grad=False)
    for strict in (False, True):
        with hmp.casts(listed()):
            exported = torch.export.export(model, (x,), strict=strict).module()
            same(exported(x), model(x))
