"""R9: state is never narrowed: statistics, parameters, buffers and gradients keep their dtype whatever the policy says.

Modules are constructed with casts off, however their classes came by a constructor.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy, same

LOW = torch.bfloat16
NORMS = {
    "BatchNorm1d": (lambda: torch.nn.BatchNorm1d(4), (8, 4)),
    "cumulative": (lambda: torch.nn.BatchNorm2d(4, momentum=None), (2, 4, 3, 3)),
    "BatchNorm3d": (lambda: torch.nn.BatchNorm3d(4), (2, 4, 2, 2, 2)),
    "InstanceNorm2d": (lambda: torch.nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 3, 3)),
}


@pytest.mark.parametrize("dtype", [LOW, torch.float16], ids=str)
def test_r9_running_statistics_are_updated_in_place_in_float32(dtype):
    for make, shape in NORMS.values():
        norm = make()
        alone, x = copy.deepcopy(norm), torch.rand(shape) + 2
        mean, variance = norm.running_mean, norm.running_var
        with hmp.casts(hmp.Policy.load("habana").replace(dtype=dtype)):
            y = norm(x)
            y.float().square().mean().backward()
            norm.eval()
            evaluated = norm(x)
        assert norm.running_mean is mean and norm.running_var is variance
        assert y.dtype == dtype
        expected = alone(x.to(dtype))
        expected.float().square().mean().backward()
        same(y, expected)
        same(mean, alone.running_mean)
        same(variance, alone.running_var)
        same(norm.weight.grad, alone.weight.grad)
        same(evaluated, alone.eval()(x.to(dtype)))


@pytest.mark.parametrize("training", [True, False])
def test_r9_statistics_of_a_third_dtype_are_written_in_training_alone(training):
    """torch takes no float16 statistics next to float32 weights: hmp casts them for the call."""
    x, weight = torch.randn(4, 3, 5), torch.ones(3)
    for norm, named in ((F.batch_norm, {"training": True}), (F.instance_norm, {})):
        mean, variance = torch.full((3,), 0.5, dtype=torch.float16), torch.full((3,), 2.0, dtype=torch.float16)
        wide = mean.float(), variance.float()
        named = named if training else {} if norm is F.batch_norm else {"use_input_stats": False}
        expected = norm(x.to(LOW), *wide, weight, None, **named)
        scaled = torch.ones((3,), dtype=torch.float16, requires_grad=True) * mean  # keeps the mean for backward: a write would be an error
        with hmp.casts("habana"):
            same(norm(x, mean, variance, weight, None, **named), expected)
        same(mean, wide[0].half())
        same(variance, wide[1].half())
        assert training == (float(variance[0]) != 2)
        if not training:
            scaled.sum().backward()


@pytest.mark.parametrize("listed", ["bf16", "fp32", "unlisted"])
def test_r9_max_norm_renormalises_the_real_weight(listed):
    lists = policy(**{listed: ["embedding", "embedding_bag"]}) if listed != "unlisted" else policy(bf16=["relu"])
    for make in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        for dtype in (torch.float32, LOW):
            table = make(4, 16, max_norm=1.0).to(dtype)
            torch.nn.init.constant_(table.weight, 5.0)
            weight = table.weight
            with hmp.casts(lists):
                y = table(torch.tensor([[1, 2]]))
            assert table.weight is weight and weight.dtype == dtype
            torch.testing.assert_close(weight[1:3].float().norm(dim=1), torch.ones(2), rtol=1e-4 if dtype is not LOW else 0.02, atol=0)
            assert (weight[0] == 5).all() and (weight[3] == 5).all()
            assert y.dtype == {"bf16": LOW, "fp32": torch.float32, "unlisted": dtype}[listed]


def test_r9_the_table_of_an_embedding_keeps_its_dtype_and_gets_its_gradient():
    for sparse in (False, True):
        table = torch.nn.Embedding(5, 3, sparse=sparse)
        with hmp.casts(policy(bf16=["embedding"])):
            y = table(torch.tensor([1, 1, 2]))
        same(y, table.weight[[1, 1, 2]].to(LOW))
        y.float().sum().backward()
        gradient = table.weight.grad
        assert gradient.dtype == torch.float32 and gradient.is_sparse == sparse
        assert gradient.to_dense()[:, 0].tolist() == [0, 2, 1, 0, 0]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_r9_sums_of_rows_are_of_cast_rows_but_where_the_gradient_is_sparse(mode):
    """Through a cast of the table a sparse gradient does not pass."""
    rows = torch.tensor([[0, 1, 1, 4], [2, 2, 3, 4]])
    for sparse in (False, True):
        table = torch.nn.EmbeddingBag(5, 16, mode=mode, sparse=sparse)
        with hmp.casts(policy(bf16=["embedding_bag"])):
            y = table(rows)
        summed = F.embedding_bag(rows, table.weight if sparse else table.weight.to(LOW), mode=mode)
        same(y, summed.to(LOW))
        y.float().sum().backward()
        gradient = table.weight.grad
        assert gradient.dtype == torch.float32 and gradient.is_sparse == sparse
        torch.testing.assert_close(gradient.to_dense()[:, 0], torch.tensor([1.0, 2, 2, 1, 2]) / (4 if mode == "mean" else 1))
        flat, offsets = rows.flatten(), torch.tensor([0, 4])
        with hmp.casts(policy(bf16=["embedding_bag"])):
            found = torch.embedding_bag(table.weight, flat, offsets, mode=int(mode == "mean"), sparse=sparse)
        same(found[0], summed.to(LOW))
        assert [part.dtype for part in found[1:]] == [torch.int64] * 3


def test_r9_what_is_assigned_to_data_and_grad_takes_their_dtype():
    p = torch.nn.Parameter(torch.full((3,), 1.5))
    p.grad = torch.full((3,), 2.0)
    with hmp.casts("habana"):
        p.data = p.data * 0.5
        assert p.dtype == torch.float32
        p.data = torch.mm(torch.ones(3, 3), p.data[:, None])[:, 0]
        p.grad = p.grad * 0.5
        same(p.grad, torch.ones(3))
        p.grad = None
        F.linear(torch.ones(2, 3), p[None]).sum().backward()
    same(p.data, torch.full((3,), 2.25))
    same(p.grad, torch.full((3,), 2.0))


LAZY = [(torch.nn.LazyBatchNorm1d, (2, 4)), (lambda: torch.nn.LazyLinear(3), (2, 4)), (lambda: torch.nn.LazyConv2d(3, 2), (2, 4, 3, 3))]


def test_r9_a_lazy_module_is_completed_in_float32():
    for make, shape in LAZY:
        x = torch.randn(shape)
        torch.manual_seed(8)
        plain = make()
        plain(x)
        torch.manual_seed(8)
        with hmp.casts("habana"):
            lazy = make()
            assert lazy(x).dtype == lazy(x.to(LOW)).dtype == LOW
        assert [p.dtype for p in lazy.parameters()] == [torch.float32] * 2
        same(list(lazy.parameters()), list(plain.parameters()))


def test_r9_an_explicit_change_of_dtype_still_works_under_convert():
    hmp.convert()
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    assert {p.dtype for p in model.to(LOW).parameters()} == {LOW}
    assert {p.dtype for p in model.half().parameters()} == {torch.float16}
    assert {p.dtype for p in model.float().parameters()} == {torch.float32}
    assert {p.dtype for p in model.double().parameters()} == {torch.float64}
    assert model[1].running_mean.dtype == torch.float64
    assert {p.dtype for p in model.bfloat16().parameters()} == {LOW}
    assert model[1].running_mean.dtype == LOW
    model.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    assert {p.dtype for p in model.parameters()} == {LOW}


def test_r9_registered_buffers_keep_their_dtype_and_other_attributes_do_not():
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))
            self.register_buffer("ids", torch.zeros(2, dtype=torch.int64))
            self.register_buffer("empty", None)
            self.plain = None

    holder = Holder()
    with hmp.casts("habana"):
        holder.count = holder.count * 2 + 1.0
        holder.ids = holder.ids + 1
        holder.empty = torch.relu(torch.ones(2))
        holder.plain = torch.relu(torch.ones(2))
        holder.count = torch.nn.functional.relu(holder.count)
    same(holder.count, torch.ones(2))
    same(holder.ids, torch.ones(2, dtype=torch.int64))
    assert holder.plain.dtype == LOW
    assert dict(holder.named_buffers())["count"].dtype == torch.float32


@pytest.mark.parametrize("name", ["habana", "bert"])
def test_r9_weights_that_torch_computes_and_stores_are_not_narrowed(name):
    with hmp.convert(policy=name):
        model = torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3))
        model(torch.randn(2, 3))
        torch.nn.utils.remove_spectral_norm(model)
        assert model.weight.dtype == torch.float32
        model = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(3, 3))
        torch.nn.utils.parametrize.remove_parametrizations(model, "weight")
        assert model.weight.dtype == torch.float32
        conv, norm = torch.nn.Conv2d(1, 2, 1).eval(), torch.nn.BatchNorm2d(2).eval()
        norm.running_var.fill_(3.0)
        fused = torch.nn.utils.fuse_conv_bn_eval(conv, norm).weight
    same(fused, torch.nn.utils.fuse_conv_bn_eval(conv, norm).weight)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_r9_a_norm_of_nested_tensors_has_no_mixed_kernel(layout):
    """So weight and bias are cast with the input; where it is unlisted, they become the input's dtype (R7)."""
    w, b, parts = torch.rand(8), torch.rand(8), [torch.randn(3, 8), torch.randn(5, 8)]
    expected = [F.layer_norm(part.to(LOW), (8,), w.to(LOW), b.to(LOW)) for part in parts]
    for lists, given in ((policy(bf16=["layer_norm"]), torch.float32), (policy(), LOW)):
        nested = torch.nested.nested_tensor([part.to(given) for part in parts], layout=layout, requires_grad=True)
        weight = w.clone().requires_grad_()
        with hmp.casts(lists):
            found = F.layer_norm(nested, (8,), weight, b)
        for one, other in zip(found.unbind(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)
        sum(one.float().sum() for one in found.unbind()).backward()
        assert nested.grad.dtype is given and weight.grad.dtype is torch.float32


UNDER_VMAP = {
    "batch_norm": lambda v: F.batch_norm(v, torch.full((4,), 0.1), torch.full((4,), 2.0), torch.full((4,), 3.0), torch.ones(4)),
    "batch_norm in training": lambda v: F.batch_norm(v, None, None, torch.full((4,), 3.0), torch.ones(4), training=True),
    "group_norm": lambda v: F.group_norm(v, 2, torch.full((4,), 3.0), torch.ones(4)),
    "group_norm by name": lambda v: F.group_norm(v, 2, weight=torch.full((4,), 3.0), bias=torch.ones(4)),
    "instance_norm": lambda v: F.instance_norm(v, weight=torch.full((4,), 3.0), bias=torch.ones(4)),
    "layer_norm": lambda v: F.layer_norm(v, (5,), torch.full((5,), 3.0), torch.ones(5)),
}


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast", ["bf16", "fp32"])
def test_r9_norms_with_float32_weights_give_under_vmap_what_they_give_without(cast: str, given: torch.dtype) -> None:
    x = torch.arange(120.0).mul(0.7).sin().mul(2).reshape(3, 2, 4, 5).to(given)
    for norm in UNDER_VMAP.values():
        with hmp.casts(hmp.Policy("norms", **{cast: {"batch_norm", "group_norm", "instance_norm", "layer_norm"}})):
            found = torch.func.vmap(norm)(x)
            one_by_one = torch.stack([norm(each) for each in x])
            torch.func.grad(lambda v, norm=norm: torch.func.vmap(norm)(v).float().sum())(x)
        assert found.dtype is one_by_one.dtype is (torch.bfloat16 if cast == "bf16" else torch.float32)
        exact = torch.stack([norm(each) for each in x.to(torch.bfloat16 if cast == "bf16" else given).double().float()])
        torch.testing.assert_close(found.float(), exact, rtol=2**-7 if cast == "bf16" else 1e-5, atol=2**-6 if cast == "bf16" else 1e-5)


def _held(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, saved or not, and plain attributes of its modules."""
    plain = {f"{path}.{name}": t for path, each in net.named_modules() for name, t in vars(each).items() if isinstance(t, torch.Tensor)}
    return {**dict(net.named_parameters()), **dict(net.named_buffers()), **plain}


def _same_state(built: torch.nn.Module, plain: torch.nn.Module) -> None:
    same(*(_held(net) for net in (built, plain)))
    assert set(built.state_dict()) == set(plain.state_dict())


def _inits() -> torch.nn.Module:
    """A module whose constructor computes: tables, rescaled weights, buffers."""

    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inverse", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
            self.register_buffer("angles", torch.arange(5000.0)[:, None] * self.inverse)
            self.weight = torch.nn.Parameter(torch.randn(4, 4) * 0.02)
            self.product = torch.nn.Parameter(torch.matmul(torch.eye(4) * 1.001, torch.ones(4)))
            self.linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
            self.spectral = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
            self.layers = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.LSTM(3, 4), torch.nn.TransformerEncoderLayer(4, 1))

    class Derived(Rotary):
        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.scaled = torch.nn.Parameter(self.weight * 3.001)

    return Derived()


@pytest.mark.parametrize("enter", [hmp.convert, lambda: hmp.casts("bert")], ids=["convert", "bert"])
def test_r9_a_module_built_under_casts_has_the_same_parameters_and_buffers(enter):
    torch.manual_seed(5)
    plain = _inits()
    torch.manual_seed(5)
    with enter():
        built = _inits()
    _same_state(built, plain)


def test_r9_casts_are_on_again_after_a_constructor_and_after_one_that_raises():
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            assert torch.relu(torch.ones(1)).dtype == torch.float32
            raise ValueError("broken")

    with hmp.casts("habana"):
        with pytest.raises(ValueError, match="broken"):
            Broken()
        assert torch.relu(torch.ones(1)).dtype == LOW
        torch.nn.Linear(2, 2)
        assert torch.relu(torch.ones(1)).dtype == LOW


def _tiny_transformers():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}
    tiny = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 64}
    return {
        "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**small, num_key_value_heads=2)),
        "ctrl": lambda: transformers.CTRLModel(transformers.CTRLConfig(**tiny, dff=32)),
        "roformer": lambda: transformers.RoFormerModel(transformers.RoFormerConfig(**small, embedding_size=16, max_position_embeddings=32)),
    }


def test_r9_transformers_models_are_the_same_when_made_or_loaded_after_convert(tmp_path):
    """from_pretrained computes the tables that no file holds, sinusoids among them, after the constructor."""
    plain, loaded = {}, {}
    for name, make in _tiny_transformers().items():
        torch.manual_seed(7)
        plain[name] = make()
        plain[name].save_pretrained(tmp_path / name)
        loaded[name] = type(plain[name]).from_pretrained(tmp_path / name, dtype=LOW)
    hmp.convert()
    for name, make in _tiny_transformers().items():
        torch.manual_seed(7)
        _same_state(make(), plain[name])
        _same_state(type(plain[name]).from_pretrained(tmp_path / name), plain[name])
        _same_state(type(plain[name]).from_pretrained(tmp_path / name, dtype=LOW), loaded[name])


def _weight(module, size):
    module.weight = torch.nn.Parameter(torch.randn(size, size) * 0.02)


def _dataclass_module() -> type[torch.nn.Module]:
    @dataclasses.dataclass(eq=False)
    class Module(torch.nn.Module):
        size: int

        def __post_init__(self):
            super().__init__()
            _weight(self, self.size)

    return Module


def _mixin_module() -> type[torch.nn.Module]:
    class Mixin:
        def __init__(self, size):
            super().__init__()
            _weight(self, size)

    return type("Module", (Mixin, torch.nn.Module), {})


def _late_module() -> type[torch.nn.Module]:
    module = type("Module", (torch.nn.Module,), {})
    module.__init__ = lambda self, size: (torch.nn.Module.__init__(self), _weight(self, size))[0]
    return module


def _wrapped_module() -> type[torch.nn.Module]:
    class Module(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            _weight(self, size)

    original = Module.__init__
    Module.__init__ = lambda self, size: original(self, size)  # as deepspeed's zero.Init does
    return Module


def test_r9_every_way_of_giving_a_class_its_constructor():
    ways = (_dataclass_module, _mixin_module, _late_module, _wrapped_module)
    classes = [make() for make in ways]
    hmp.convert()
    for cls in [*classes, *(make() for make in ways)]:
        torch.manual_seed(6)
        built = cls(4)
        with hmp.disable_casts():
            torch.manual_seed(6)
            same(built.weight.data, torch.randn(4, 4) * 0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that somebody wrapped the constructor after hmp did
        hmp.revert()


EVERY_VIEW = hmp.Policy("views", bf16={"reshape", "view", "t", "contiguous", "clone", "narrow", "mul", "add"})


def test_r9_files_of_weights_are_read_and_written_as_they_are(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"a": torch.randn(3, 2) * 1.001, "sparse": torch.randn(3, 2).to_sparse()}
    dense = {"a": state["a"]}
    hmp.convert(policy=EVERY_VIEW.replace(bf16=EVERY_VIEW.bf16 | {"sparse_coo_tensor"}))
    torch.save(state, tmp_path / "a.pt")
    safetensors.save_file(dense, tmp_path / "a.safetensors")
    for loaded in (
        torch.load(tmp_path / "a.pt"),
        safetensors.load_file(tmp_path / "a.safetensors"),
        safetensors.load((tmp_path / "a.safetensors").read_bytes()),
    ):
        assert torch.equal(loaded["a"], state["a"])
        assert "sparse" not in loaded or loaded["sparse"].dtype is torch.float32
