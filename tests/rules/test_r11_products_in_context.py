"""R11, "No instructions", in the places where casts are lost: hooks, checkpoints, modes, threads, classes of tensors, compilers, memory.

The oracle is plain torch with the casts written out: `op(x.to(low).float(), ...).to(low)`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import hmp
from no_instructions_kit import (
    AGAIN,
    Call,
    Kernels,
    all_same,
    attention,
    by_hand,
    convolution,
    dropped,
    gradients,
    linear,
    listed,
    random,
    recurrent,
    weights_of,
)
from oracle import BF16, F16, F32, assert_identical
from process_kit import run_in_another_process
from strategies import Tagged
from trap_kit import policy, same


@pytest.fixture(autouse=True)
def no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that has none; what a test sets by hmp.set_low_kernels() ends with it."""
    monkeypatch.setattr("hmp.low_kernels._chosen", None)
    monkeypatch.setenv("HMP_LOW_KERNELS", "float32")


# --- hooks, checkpoints, transforms, modes


def block(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Four products, attention with dropout among them, of which several are large."""
    q, k, v = (F.linear(x, w) for w in weights[:3])
    found = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=0.2)[:, 0]
    return torch.matmul(found, weights[3])


def block_by_hand(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    linear = by_hand(F.linear)
    q, k, v = (linear(x, w) for w in weights[:3])
    found = by_hand(F.scaled_dot_product_attention)(q[:, None], k[:, None], v[:, None], dropout_p=0.2)[:, 0]
    return by_hand(torch.matmul)(found, weights[3])


def block_args(dtype: torch.dtype = F32) -> list[torch.Tensor]:
    return [random(2, 36, 64, dtype=dtype), *(random(64, 64, dtype=dtype, seed=i, scale=0.2) for i in range(4))]


def trained(call: Call, args: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.default_generator.manual_seed(5)
    end = call(*args)
    end.float().square().sum().backward()
    return [end.detach(), *(a.grad for a in args)]


def on_cpu(*args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(*args)


def without_hooks(*args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        return block(*args)


def through_numpy(*args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t.float().numpy()), lambda p: torch.from_numpy(p[1]).to(p[0])):
        return block(*args)


def selective(*args: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoints.checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


class Mode(TorchFunctionMode):
    """A mode of the user's that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_mode(*args: torch.Tensor) -> torch.Tensor:
    with Mode():
        return block(*args)


def in_two_modes(*args: torch.Tensor) -> torch.Tensor:
    with Mode(), torch.device("cpu"), Mode():
        return block(*args)


def on_device(*args: torch.Tensor) -> torch.Tensor:
    with torch.device("cpu"):
        return block(*args)


def anomaly(*args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return block(*args)


AROUND: dict[str, Call] = {
    "nothing": block,
    "a checkpoint": lambda *args: checkpoints.checkpoint(block, *args, use_reentrant=False),
    "a reentrant checkpoint": lambda *args: checkpoints.checkpoint(block, *args, use_reentrant=True),
    "a selective checkpoint": selective,
    "save_on_cpu": on_cpu,
    "disabled hooks": without_hooks,
    "hooks through numpy": through_numpy,
    "a device, before any mode": on_device,
    "a function mode": in_mode,
    "function modes and a device": in_two_modes,
    "a device, after a mode": on_device,
    "anomaly mode": anomaly,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_r11_what_stands_around_the_products_changes_no_bit(dtype: torch.dtype) -> None:
    """Checkpoints, hooks for saved tensors, modes: in the order above, for a mode of the user's changes how torch's functions are found."""
    expected = trained(block_by_hand, block_args(dtype))
    for name, call in AROUND.items():
        with hmp.casts(listed()):
            found = trained(call, block_args(dtype))
        for one, other in zip(found, expected, strict=True):
            assert_identical(one, other, name)


def test_r11_a_users_hooks_get_the_inputs_in_the_low_dtype() -> None:
    """As from torch's own kernel."""
    args = [random(2, 36, 64), random(64, 64)]
    seen: list[tuple[torch.dtype, torch.Size]] = []
    with hmp.casts(listed()), torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append((t.dtype, t.shape)) or t, lambda t: t):
        F.linear(*args)
        F.conv1d(args[0].transpose(1, 2), random(8, 64, 3))
    assert len(seen) == 4 and {dtype for dtype, _ in seen} == {BF16}


def test_r11_a_default_device_changes_no_bit() -> None:
    before = torch.get_default_device()
    torch.set_default_device("cpu")
    try:
        with hmp.casts(listed()):
            found = trained(block, block_args())
    finally:
        torch.set_default_device(before if before.type != "cpu" else None)
    all_same(found, trained(block_by_hand, block_args()))


def scalar(call: Call) -> Call:
    return lambda *args: call(*args).float().square().sum()


TRANSFORMS: dict[str, Callable[[Call], Any]] = {
    "grad": lambda f: torch.func.grad(scalar(f), (0, 1))(*pair()),
    "vjp": lambda f: torch.func.vjp(f, *pair())[1](torch.ones(3, 7, dtype=BF16)),
    "jvp": lambda f: torch.func.jvp(f, pair(), pair()),
    "vmap": lambda f: torch.func.vmap(f, (0, None))(pair()[0][:, None], pair()[1]),
    "vmap of weights": lambda f: torch.func.vmap(f, (None, 0))(pair()[0], torch.stack([pair()[1]] * 3)),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(scalar(f), 1), (0, None))(pair()[0][:, None], pair()[1]),
    "jacrev": lambda f: torch.func.jacrev(f, (0, 1))(*pair()),
    "jacfwd": lambda f: torch.func.jacfwd(f, (0, 1))(*pair()),
    "hessian": lambda f: torch.func.hessian(scalar(f), 1)(*pair()),
    "functional.jvp": lambda f: torch.autograd.functional.jvp(f, pair(), pair()),
}


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return random(3, 5, grad=False), random(7, 5, grad=False)


def test_r11_transforms_give_what_they_give_with_the_casts_written_out() -> None:
    """Also with weights whose copies inference keeps."""
    for name, transform in TRANSFORMS.items():
        with hmp.casts(listed()):
            found = pytree.tree_leaves(transform(F.linear))
        for one, other in zip(found, pytree.tree_leaves(transform(by_hand(F.linear))), strict=True):
            assert_identical(one, other, name)
    model, x = torch.nn.Linear(5, 7), pair()[0]
    with torch.no_grad(), hmp.casts(listed()):
        for _ in range(3):
            model(x)
        same(torch.func.vmap(model)(x), by_hand(F.linear)(x, model.weight, model.bias))


class Duck:
    """Handles torch's functions, and is no tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func


def test_r11_handlers_and_torch_fx_get_the_functions_that_users_hold() -> None:
    """R19."""
    with hmp.casts(listed()):
        assert torch.matmul(Duck(), random(2, 2)) == torch.matmul
        assert F.linear(random(2, 2, dtype=BF16), Duck()) == F.linear
        graph = torch.fx.symbolic_trace(lambda x, w: torch.matmul(F.linear(x, w), w))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [F.linear, torch.matmul]
    x, w = random(3, 4), random(4, 4)
    with hmp.casts(listed()):
        same(graph(x, w), by_hand(torch.matmul)(by_hand(F.linear)(x, w), w))


# --- training


def test_r11_scaled_float16_training_skips_the_step_that_overflows() -> None:
    """A GradScaler's losses: a step with an infinite gradient is skipped, the others are those of the casts written out."""
    found = {}
    for kind in ("hmp", "by hand"):
        torch.default_generator.manual_seed(1)
        layers = [torch.nn.Linear(16, 16) for _ in range(2)]
        weights = [p for layer in layers for p in layer.parameters()]
        optimizer, scaler = torch.optim.SGD(weights, 0.05), torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            x = random(8, 16, grad=False, seed=step)
            if kind == "hmp":
                with hmp.casts(listed(F16)):
                    end = layers[1](torch.tanh(layers[0](x)))
            else:
                linear = by_hand(F.linear, F16)
                end = linear(torch.tanh(linear(x, *layers[0].parameters())), *layers[1].parameters())
            scaler.scale(end.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        found[kind] = [p.detach() for p in weights], scales
    all_same(found["hmp"][0], found["by hand"][0])
    assert found["hmp"][1] == found["by hand"][1] and found["hmp"][1][0] < 2.0**24  # the first overflowed


@pytest.mark.parametrize("recipe", ["bf16", "int8", "fp8"])
def test_r11_a_saved_list_packs_what_a_float32_product_keeps(recipe: str) -> None:
    """R22: forward has the same bits, what is packed is as near to it as the recipe is, in bfloat16 the same bits."""
    args = [random(64, 128), random(64, 128, scale=0.1), random(1, 2, 80, 32)]

    def model(linear: Call, attend: Call) -> list[torch.Tensor]:
        hidden = linear(torch.tanh(linear(args[0], args[1])), args[1].t())
        attended = attend(args[2], args[2], args[2])
        return [hidden, attended, *gradients(hidden, args[:2]), *gradients(attended, args[2:])]

    expected = model(by_hand(F.linear), by_hand(attention))
    names = {"linear", "scaled_dot_product_attention"}
    with hmp.casts(hmp.Policy("saves", bf16=frozenset(names), saved=frozenset(names), saved_recipe=recipe)):
        found = model(F.linear, attention)
    all_same(found[:2], expected[:2])
    for one, other in zip(found[2:], expected[2:], strict=True):
        assert float((one - other).norm() / other.norm()) <= {"bf16": 0.02, "int8": 0.02, "fp8": 0.08}[recipe]
    if recipe == "bf16":
        all_same(found[2:4], expected[2:4])


def test_r11_fp8_products_are_emulated_in_float32_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product on the FP8 list has the same bits on every processor; the others are float32's, rounded."""
    x, w, b = random(16, 32), random(32, 32), random(32)
    eighth = hmp.Policy("eighth", fp8=frozenset({"linear"}), bf16=frozenset({"mm"}))
    found = {}
    for kernels in ("native", "float32"):
        monkeypatch.setenv("HMP_LOW_KERNELS", kernels)
        with hmp.casts(eighth):
            end = F.linear(x, w, b)
            found[kernels] = [end, *gradients(end, [x, w, b])]
            if kernels == "float32":
                same(torch.mm(x, w), by_hand(torch.mm)(x, w))
        hmp.revert()
    all_same(found["float32"], found["native"])


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch-cpu", "habana", "saved8", "apex-o1", "bert", "resnet50"])
def test_r11_presets_train_as_near_to_float32_as_with_torchs_kernels(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.out = torch.nn.Conv1d(16, 32, 3, padding=1), torch.nn.Linear(32, 8)
            self.gru, self.attention = torch.nn.GRU(32, 32, batch_first=True), torch.nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.gelu(self.convolution(x)).transpose(1, 2)
            x = self.gru(x)[0].to(x.dtype) + x
            return self.out(self.attention(x, x, x, need_weights=False)[0].to(x.dtype))

    torch.default_generator.manual_seed(0)
    model, x = Model(), random(4, 16, 24)

    def train() -> list[torch.Tensor]:
        of = [x, *model.parameters()]
        return list(torch.autograd.grad(model(x).float().square().sum(), of))

    exact, errors, dtypes = train(), {}, {}
    for kernels in ("native", "float32"):
        monkeypatch.setenv("HMP_LOW_KERNELS", kernels)
        with hmp.casts(preset):
            found, dtypes[kernels] = train(), model(x).dtype
        hmp.revert()
        errors[kernels] = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)) ** 0.5
    assert dtypes["float32"] is dtypes["native"]
    assert errors["float32"] <= 1.25 * errors["native"] + 1e-6


RECURRENT = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "rnn": torch.nn.RNN, "gru_cell": torch.nn.GRUCell, "lstm_cell": torch.nn.LSTMCell}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_r11_recurrent_layers_under_torch_cpu_return_the_dtypes_of_torch_autocast(packed: bool) -> None:
    """What torch.autocast leaves in float32 (a state, the result of a GRU and of an LSTM of a packed batch) stays so and is not rounded."""
    for name, kind in RECURRENT.items():
        layer = kind(12, 16)
        if name.endswith("cell"):
            if packed:
                continue
            x = random(3, 12)
        else:
            x = random(6, 3, 12)
        given = torch.nn.utils.rnn.pack_padded_sequence(x, [6, 4, 1]) if packed else x
        with torch.autocast("cpu"):
            autocast = layer(given)
        with hmp.casts("torch-cpu"):
            found = layer(given)
        rounded = {n: p.to(BF16).float() for n, p in layer.named_parameters()}
        expected = torch.func.functional_call(layer, rounded, (_mapped(given, lambda t: t.to(BF16).float()),))
        for one, wide, dtype in zip(_values(found), _values(expected), [t.dtype for t in _values(autocast)], strict=True):
            assert_identical(one, wide.to(dtype), name)
        of = [x, *layer.parameters()]
        ends = [next(_values(found)), next(_values(expected)).to(next(_values(found)).dtype)]
        all_same(*(gradients(end, of, retain_graph=True) for end in ends))  # both go through one pack_padded_sequence


def test_r11_a_float32_state_beside_low_weights_keeps_its_gradient() -> None:
    """torch-cpu: a GRU's state is not rounded."""
    layer, x, h = torch.nn.GRU(40, 40), random(9, 8, 40), random(1, 8, 40)
    of = [x, h, *layer.parameters()]
    with hmp.casts("torch-cpu"):
        found = layer(x, h)[0]
    rounded = {n: p.to(BF16).float() for n, p in layer.named_parameters()}
    expected = torch.func.functional_call(layer, rounded, (x.to(BF16).float(), h))[0]
    same(found, expected)
    all_same(gradients(found, of), gradients(expected, of))


def test_r11_eval_computes_what_training_does() -> None:
    """R8: torch's fast paths for attention in eval are one op each, whose products would not be decided."""
    layer, x = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), random(2, 5, 16, grad=False)
    for lists in ("habana", "torch-cpu"):
        with hmp.casts(lists):
            trained = layer.train()(x)
            with torch.no_grad():
                same(layer.eval()(x), trained)


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return value._replace(data=function(value.data)) if hasattr(value, "batch_sizes") else function(value)


def _values(value: Any) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, tuple) and not hasattr(value, "batch_sizes") else (value,):
        if isinstance(each, tuple) and not hasattr(each, "batch_sizes"):
            yield from each
        else:
            yield each.data if hasattr(each, "batch_sizes") else each


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


@pytest.mark.parametrize("lists", [listed(), policy(), "torch-cpu"], ids=["listed", "unlisted", "torch-cpu"])
def test_r11_a_region_of_torch_autocast_inside_has_the_last_word(lists: Any) -> None:
    """R17: the results have the dtype of the region."""
    x, w = random(8, 16), random(16, 16)
    for dtype in (BF16, F16):
        for has in (F32, BF16, F16):
            with hmp.casts(lists), torch.autocast("cpu", dtype=dtype):
                found = F.linear(x.to(has), w.to(has))
                assert torch.mm(x.to(has), w.to(has)).dtype is found.dtype is dtype
            all_same([g.dtype for g in gradients(found, [x, w])], [F32, F32])
    with torch.autocast("cpu", dtype=F16), hmp.casts(listed()):
        same(F.linear(x, w), by_hand(F.linear)(x, w))


def test_r11_a_wrong_value_names_the_three_and_patches_nothing() -> None:
    run = run_in_another_process(
        """
        import os
        os.environ["HMP_LOW_KERNELS"] = "fast"
        names = torch.mm, torch.Tensor.matmul, F.linear
        for use in (hmp.convert, lambda: hmp.casts("habana").__enter__(), lambda: hmp.set_low_kernels("float32")):
            try:
                use()
            except hmp.HmpError as error:
                print(all(repr(each) in str(error) for each in ("auto", "native", "float32", "fast")))
        print((torch.mm, torch.Tensor.matmul, F.linear) == names, hmp.is_converted())
        os.environ["HMP_LOW_KERNELS"] = ""
        try:
            hmp.set_low_kernels("fast")
        except hmp.HmpError as error:
            print(all(repr(each) in str(error) for each in ("auto", "native", "float32", "fast")))
        print(hmp.set_low_kernels("native"), hmp.set_low_kernels("float32"), hmp.set_low_kernels("auto"))
        """
    )
    assert run.split() == "True True True True False True auto native float32".split()


@pytest.mark.slow
def test_r11_auto_is_float32_for_a_dtype_without_instructions_and_native_for_others() -> None:
    """As torch's own flags say: in processes that see this processor whole, and without AVX512."""
    code = """
        from torch.utils._python_dispatch import TorchDispatchMode
        class Kernels(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if "mm" in str(func):
                    print(args[0].dtype)
                return func(*args, **(kwargs or {}))
        for low in (torch.bfloat16, torch.float16):
            has = getattr(torch.ops.mkldnn, f"_is_mkldnn_{'bf16' if low is torch.bfloat16 else 'fp16'}_supported")()
            with hmp.casts(hmp.Policy("mine", bf16={"mm"}, dtype=low)), Kernels():
                print(low if has else torch.float32)
                torch.mm(torch.ones(4, 4), torch.ones(4, 4))
    """
    for environment in ({"HMP_LOW_KERNELS": ""}, {"HMP_LOW_KERNELS": "auto", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            said = run_in_another_process(code).split()
        assert said[::2] == said[1::2] and len(said) == 4


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
        if func in (torch.ops.aten.as_strided.default, torch.ops.aten.equal.default):
            raise NotImplementedError(f"Wrapped has no {func}")
        args, kwargs = pytree.tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        return pytree.tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


class Handles(torch.Tensor):
    """A subclass with a `__torch_function__` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", [Wrapped, Handles, Tagged], ids=lambda k: k.__name__)
def test_r11_subclasses_get_the_numbers_of_plain_tensors(kind: Any, dtype: torch.dtype) -> None:
    for shape in ((2, 36, 64), (3, 64)):  # what linear keeps of the first is a view of its input
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
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_r11_nested_tensors_compute_in_float32(layout: torch.layout) -> None:
    parts = [random(n, 64, grad=False, seed=n) for n in (30, 50)]
    w = random(70, 64)
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    with hmp.casts(listed()):
        found = torch.cat(F.linear(nested, w).unbind())
    expected = by_hand(F.linear)(torch.cat(parts), w)
    same(found, expected)
    all_same(gradients(found, [w]), gradients(expected, [w]))


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


def test_r11_fake_tensors_have_no_values_to_be_compared() -> None:
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
    """A DTensor knows no as_strided, and views of one are kept for backward."""
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


@pytest.mark.slow
def test_r11_cells_and_convolutions_compile(fresh_compiler: None) -> None:
    gru, lstm, convolution = torch.nn.GRUCell(12, 16), torch.nn.LSTMCell(12, 16), torch.nn.Conv2d(3, 4, 3)
    x, h, image = random(3, 12), random(3, 16), random(1, 3, 6, 6)

    def forward() -> Any:
        return [gru(x, h), *lstm(x, (h, h)), convolution(image)]

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    for lists in (listed(), "torch-cpu"):
        with hmp.casts(lists):
            all_same(compiled(), forward())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("width", [24, 136])
def test_r11_a_traced_model_computes_in_float32_and_follows_its_weights(width: int) -> None:
    """Small weights, and those whose copy in float32 is shared; with a gradient and without: no copy that is kept gets into a trace."""
    model, x = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 4)), random(8, width, grad=False)
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


@pytest.mark.slow
def test_r11_an_exported_model_computes_in_float32(fresh_compiler: None) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), random(8, 24, grad=False)
    for strict in (False, True):
        with hmp.casts(listed()):
            exported = torch.export.export(model, (x,), strict=strict).module()
            same(exported(x), model(x))


# --- memory


def kept_by_hooks(call: Call) -> int:
    """The bytes of the memory that the ops of a call keep for backward, as hooks for saved tensors see it."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            found[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    given = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and t.is_leaf and t.requires_grad}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive.append(call())
    return sum(found.values())


def kept_by_graph(call: Call) -> int:
    """The bytes that a call allocates and does not free, its result aside."""
    call()  # kernels keep some memory from their first call on
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        end = call()
    return sum(event.self_cpu_memory_usage for event in profile.key_averages()) - end.nbytes


BYTES: dict[str, tuple[Callable[[Call], int], Call, Callable[[torch.dtype], list[torch.Tensor]]]] = {
    "linear": (kept_by_hooks, linear, lambda dtype: [random(4, 64, 64), random(64, 64), random(64)]),
    "heads": (kept_by_hooks, AGAIN["heads"][0], lambda dtype: [random(2, 40, 4, 32, seed=i) for i in range(2)]),
    "conv2d": (kept_by_hooks, convolution, lambda dtype: [random(4, 8, 16, 16), random(8, 8, 3, 3), random(8)]),
    "attention": (kept_by_graph, attention, lambda dtype: [random(2, 4, 64, 32, seed=i) for i in range(3)]),
    "attention with dropout": (kept_by_graph, dropped, lambda dtype: [random(2, 4, 64, 32, seed=i) for i in range(3)]),
    "gru": (kept_by_graph, recurrent("gru"), lambda dtype: [random(16, 16, 64), *weights_of(3, 64, 1, F32)]),
    "lstm": (kept_by_graph, recurrent("lstm"), lambda dtype: [random(16, 16, 64), *weights_of(4, 64, 1, F32)]),
}


@pytest.mark.parametrize(
    "name", [n if how is kept_by_hooks else pytest.param(n, marks=pytest.mark.slow) for n, (how, _, _) in BYTES.items()]
)
def test_r11_no_more_bytes_are_kept_for_backward_than_by_torch_autocast(name: str) -> None:
    count, call, make = BYTES[name]
    args = make(F32)
    with torch.autocast("cpu", cache_enabled=False):
        autocast = count(lambda: call(*args))
    with hmp.casts(listed()):
        ours = count(lambda: call(*args))
    assert 0 < ours <= 1.05 * autocast


def test_r11_what_is_kept_is_freed_when_backward_has_run_or_the_result_is_gone() -> None:
    """Without the garbage collector: there is no cycle."""
    gc.collect()
    gc.disable()
    try:
        for name, (call, make) in AGAIN.items():
            for ends in ("backward", "dropped"):
                given = [a * 1 for a in make(BF16)]
                with hmp.casts(listed()):
                    found = call(*given)
                references = [weakref.ref(each) for each in (*given, found)]
                if ends == "backward":
                    found.float().sum().backward()
                    del given
                    assert not any(r() for r in references[:-1]), name  # while the result lives
                else:
                    del given
                del found
                assert not any(r() for r in references), name
    finally:
        gc.enable()


# --- tools


def test_r11_tools_see_a_product_that_computes_in_float32() -> None:
    """record, compare, detect_nonfinite and summary run, and change nothing."""
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)), random(8, 16, grad=False)
    lists = listed()
    with hmp.casts(lists):
        expected = model(x)
    with hmp.record() as report, hmp.casts(lists):
        same(model(x), expected)
    assert "linear" in str(report)
    comparison = hmp.compare(model, x, policy=lists, loss=lambda end: end.float().square().mean())
    assert "linear" in str(comparison)
    assert "linear" in str(hmp.summary(model, x, policy=lists)).lower()
    with hmp.casts(listed(F16)), pytest.raises(hmp.NonFiniteError, match="mm"), hmp.detect_nonfinite():
        torch.mm(torch.full((4, 4), 300.0), torch.full((4, 4), 300.0))


@pytest.mark.slow
def test_r11_benchmark_and_tune_run_under_it() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)), random(8, 16, grad=False)
    assert "torch-cpu" in str(hmp.benchmark(lambda: model(x).float().sum().backward(), ["torch-cpu"], model=model, rounds=1, steps=1))
    found = hmp.tune(model, [x] * 2, loss=lambda model, batch: model(batch).float().square().mean(), progress=False, steps=2)
    with hmp.casts(found.policy):
        model(x)
