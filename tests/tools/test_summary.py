"""summary(), and what a report says of the models that ran: dtypes, parameters, and what is saved, as hooks of plain torch see it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hmp
from copies_kit import casts_of
from plain_hooks import Plain, seen_by_hooks
from torch_has import SAVED_TENSORS, SAVED_TENSORS_HOOKS
from trap_kit import policy


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, None, x * 2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(Twice.apply(F.gelu(self.up(self.norm(x))))) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv1d(3, 16, 3, padding=1)
        self.seen = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 4), nn.Softmax(-1))
        self.unused = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = self.seen(self.embed(x)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return {"logits": (self.head(x.mean(1).exp()), torch.stack([x[:, 0], x[:, 1]]))}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.randn(8, 3, 10, generator=torch.Generator().manual_seed(1))


def plainly(model: nn.Module, x: torch.Tensor) -> Plain:
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        return seen_by_hooks(model, lambda model: model(x))


@pytest.mark.native_kernels  # computed in float32, products save float32
def test_layers_are_those_that_hooks_of_plain_torch_see_under_autocast(net: Net) -> None:
    plain = plainly(net, X)
    torch.manual_seed(3)
    found = hmp.summary(net, X)
    assert [layer.path for layer in found.layers] == [path for path, _ in net.named_modules()]
    for path, module in net.named_modules():
        layer = found[path]
        assert layer.kind == type(module).__name__
        assert layer.parameters == sum(p.numel() for p in module._parameters.values() if p is not None)
        of_tensors = (plain.shapes[path],) if path in plain.shapes else ()
        assert layer.shapes == (of_tensors if path else ((8, 4), (2, 8, 16)))
        assert layer.saved_bytes == plain.saved[path], path
        if not list(module.children()) and path in plain.dtypes:
            assert layer.computes == (plain.dtypes[path],), path
    assert found["blocks.0.up"].computes == ("bfloat16",)
    assert found["unused"].computes == () and found["unused"].saved_bytes == 0
    assert found.parameters == sum(p.numel() for p in net.parameters())
    net.unused.weight = net.blocks[1].up.weight
    assert hmp.summary(net).parameters == sum(p.numel() for p in net.parameters())  # the tied one once
    assert found.saved_bytes == sum(plain.saved.values()) > 0


class WithLoss(nn.Module):
    """Returns a loss, as classifiers of transformers do: by a module that is made for the call and belongs to no module of the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.CrossEntropyLoss()(self.head(x), torch.zeros(len(x), dtype=torch.int64))


def test_what_a_module_made_for_the_call_does_counts_for_the_module_that_called_it() -> None:
    model, x = WithLoss(), torch.randn(8, 16)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        head = model.head(x)
        own = sum(kept.values())
        nn.CrossEntropyLoss()(head, torch.zeros(8, dtype=torch.int64))
    assert sum(kept.values()) - own > 8 * 500 * 4  # the log-probabilities
    found = hmp.summary(model, x, hmp.Policy("none"))
    assert found[""].computes == ("float32",)
    assert (found["head"].saved_bytes, found.saved_bytes) == (own, sum(kept.values()))


def test_a_policy_changes_what_layers_compute_in(net: Net) -> None:
    base = hmp.Policy(bf16={"linear"}, fp32={"softmax", "layer_norm"})
    found = hmp.summary(net, X, base)
    assert {path: found[path].computes for path in ("embed", "blocks.1.down", "blocks.1.norm", "head.2")} == {
        "embed": ("float32",),
        "blocks.1.down": ("bfloat16",),
        "blocks.1.norm": ("float32",),
        "head.2": ("float32",),
    }
    scoped = hmp.Policy(bf16={"linear @ head.*"})
    found = hmp.summary(net, X, scoped)
    assert (found["head.1"].computes, found["blocks.0.up"].computes) == (("bfloat16",), ("float32",))


def test_without_a_batch_there_are_parameters_alone(net: Net) -> None:
    found = hmp.summary(net)
    assert found.saved_bytes == 0 and not any(layer.computes for layer in found.layers)
    assert "Without a batch" in str(found)


def test_the_table_has_each_layer_and_the_sum(net: Net) -> None:
    text = str(hmp.summary(net.blocks[0], torch.randn(2, 5, 16), hmp.Policy("mine", bf16={"linear"})))
    assert "policy 'mine'" in text and "1,120 parameters" in text
    (up,) = (line for line in text.splitlines() if "up (Linear)" in line)
    assert "[2, 5, 32]" in up and "544" in up and "bfloat16" in up


@pytest.mark.native_kernels  # computed in float32, products save float32
@pytest.mark.parametrize(
    ("policy", "frozen", "expected"),
    [
        # x in bfloat16, nothing of a weight that no gradient goes through; linear's result and the statistics; x and the weight
        ("torch-cpu", False, [(3 * 8 * 2, 0), (3 * 16 * 2 + 2 * 3 * 4, 0), (3 * 16 * 2, 16 * 4 * 2)]),
        ("torch-cpu", True, [(0, 8 * 16 * 2), (3 * 16 * 2 + 2 * 3 * 4, 0), (0, 16 * 4 * 2)]),
        (hmp.Policy(fp32_result={"linear"}), True, [(0, 8 * 16 * 2), (3 * 16 * 4 + 2 * 3 * 4, 0), (0, 16 * 4 * 2)]),
        # without a list the batch and the weights themselves are kept, and the latter are not counted
        (hmp.Policy("none"), False, [(3 * 8 * 4, 0), (3 * 16 * 4 + 2 * 3 * 4, 0), (3 * 16 * 4, 0)]),
    ],
)
def test_copies_of_weights_are_told_from_activations(policy: hmp.Policy | str, frozen: bool, expected: list[tuple[int, int]]) -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 4, bias=False)).requires_grad_(not frozen)
    x = torch.randn(3, 8, requires_grad=frozen)
    found = hmp.summary(model, x, policy)
    assert [(layer.saved_bytes - layer.weight_bytes, layer.weight_bytes) for layer in found.layers[1:]] == expected
    assert found.weight_bytes == sum(weights for _, weights in expected)
    assert f"{found.weight_bytes} B of copies of weights" in str(found)


def test_on_the_meta_device_copies_of_frozen_weights_are_known_by_their_shape() -> None:
    model = nn.Linear(8, 16, bias=False, device="meta").requires_grad_(False)
    found = hmp.summary(model, torch.randn(3, 8, device="meta", requires_grad=True), hmp.Policy(bf16={"linear"}))
    assert (found.saved_bytes, found.weight_bytes) == (8 * 16 * 2, 8 * 16 * 2)


LISTS = policy(bf16={"linear", "matmul"}, fp32={"softmax", "layer_norm"})
needs_saved = pytest.mark.skipif(not SAVED_TENSORS, reason="this torch does not tell what a node of the graph saved")


@needs_saved
def test_bytes_kept_for_backward_are_those_that_hooks_see_module_by_module() -> None:
    net, x = Net(), X
    with hmp.casts(LISTS):
        expected = {name or "Net": kept for name, kept in seen_by_hooks(net, lambda net: net(x)).saved.items()}
        with hmp.record() as report:
            with torch.no_grad():
                net(x)
            assert report.models[0].kept is None  # autograd recorded nothing
            for _ in range(2):
                net(x)
            net(torch.randn(50, 3, 10))  # of the first call alone
    (model,) = report.models
    assert model.kept == expected
    assert set(expected) >= {"Net", "head.1", "blocks.0", "blocks.1.norm", "blocks.0.up"}


@needs_saved
def test_hooks_of_the_user_are_called_as_without_a_recording() -> None:
    class Halved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float()):
                return x.exp()

    net, x = nn.Sequential(nn.Linear(4, 4), Halved(), nn.Linear(4, 4)), torch.randn(2, 4)
    expected = torch.autograd.grad(net(x).sum(), net[0].weight)[0]
    with hmp.record() as report:
        net(x)
    assert report.models[0].kept == {"0": 32, "2": 32}
    packed: list[int] = []
    with saved_tensors_hooks(lambda tensor: packed.append(1) or tensor, lambda tensor: tensor), hmp.record() as report:
        got = torch.autograd.grad(net(x).sum(), net[0].weight)[0]
    assert packed and torch.equal(got, expected) and report.models[0].kept is None


@needs_saved
def test_a_write_before_backward_is_an_error_under_a_recording_too() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with hmp.record():
        y = layer(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        layer(x).sum().backward()


@needs_saved
def test_transforms_that_refuse_hooks_run_in_a_recorded_model() -> None:
    class Slopes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slope = torch.func.grad(lambda x: x.sin().sum())(x)
            each = torch.func.vmap(lambda row: row.exp() * row)(x)
            return super().forward(slope + each)

    net, x = Slopes(4, 4), torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), x)[0]
    disable = torch._C._autograd._saved_tensors_hooks_disable
    with hmp.record() as report:
        got = torch.autograd.grad(net(x).sum(), x)[0]
    assert torch.equal(got, expected) and report.models[0].kept
    assert torch._C._autograd._saved_tensors_hooks_disable is disable
    assert hmp.summary(net, x, "habana").saved_bytes > 0


@needs_saved
def test_a_recorded_program_makes_the_casts_that_it_makes_alone() -> None:
    once, twice, x = nn.Linear(64, 64), nn.Sequential(*[nn.Linear(64, 64)] * 2), torch.randn(8, 64)
    for model in (once, twice):

        def program(model: nn.Module = model) -> None:
            with hmp.casts(LISTS):
                model(x)

        alone = casts_of(program)
        with hmp.record() as report:
            assert casts_of(program) == alone
        assert report.models[0].kept


def test_parameters_are_those_that_plain_python_counts_and_models_are_not_kept_alive() -> None:
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2).double(), nn.Linear(6, 3).bfloat16().requires_grad_(False))
    tied[1].weight = tied[0].weight
    mine = {id(each): each for each in tied.parameters()}.values()
    with torch.no_grad(), hmp.record() as report:
        for model in (nn.Sequential(nn.LazyLinear(7)), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 6)):
            model(torch.randn(3, 6))
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        tied.forward = lambda x: x  # type: ignore[method-assign]
        tied(torch.randn(3, 6))
    lazy, linear, last = report.models
    assert lazy.parameters == {"float32": 7 * 6 + 7}  # known after the call
    assert (linear.name, linear.count) == ("Linear", 2)
    assert last.parameters == {"float32": 36 + 6 + 6, "float64": 14, "bfloat16": 21}
    assert last.trainable == sum(each.numel() for each in mine if each.requires_grad)
    assert last.parameter_bytes == sum(each.numel() * each.element_size() for each in mine)
    assert report.about["model"] == "Sequential, Linear"


def test_models_are_in_the_json_and_taken_together_in_sums() -> None:
    with hmp.casts(LISTS), hmp.record() as report:
        Net()(X)
    again = hmp.types.Report.from_dict(report.to_dict())
    assert again.models == report.models and again.about["model"] == "Net"
    with hmp.record() as other, torch.no_grad():
        Net()(X)
        Block()(torch.randn(5, 16))
    net, block = other.merge(again).models
    assert net == report.models[0]  # of two ranks: one model, and what is kept where it is known
    assert (block.name, block.kept) == ("Block", None)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=False))


@needs_saved
@pytest.mark.parametrize("preset", ["saved8", "autocast"])
def test_what_is_packed_counts_as_it_is_left(preset: str) -> None:
    net, x = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.Softmax(-1), nn.Linear(256, 1)), torch.randn(512, 256)
    with hmp.casts(preset), hmp.record() as report:
        net(x).sum().backward()
    assert report.models[0].kept_bytes == hmp.summary(net, x, preset).saved_bytes


@needs_saved
@pytest.mark.parametrize("preset", ["habana", "torch-cpu"])
@pytest.mark.native_kernels  # computed in float32, products save float32
def test_under_a_checkpoint_all_tools_count_the_same_bytes(preset: str) -> None:
    net, x = Checkpointed(), torch.randn(32, 16)
    with hmp.casts(preset), hmp.record() as report:
        net(x).sum().backward()
    (model,) = report.models
    benchmarked = hmp.benchmark(lambda: net(x).sum().backward(), [preset], model=net, rounds=3, steps=1, device="cpu")
    # in bfloat16: what the first and the last layer are given, the weight of the last one, and what the checkpoint is given
    assert model.kept_bytes == hmp.summary(net, x, preset).saved_bytes == benchmarked[preset].memory == 2 * (3 * 32 * 16 + 16)


@pytest.mark.skipif(not SAVED_TENSORS_HOOKS, reason="before torch 2.9 a recording counts nothing that models keep")
@pytest.mark.native_kernels  # computed in float32, products save float32
def test_a_report_tells_copies_of_weights_from_activations() -> None:
    net, x = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False)), torch.randn(8, 16)
    with hmp.casts("torch-cpu"), hmp.record() as report:
        net(x).float().sum().backward()
    (model,) = report.models
    # in bfloat16: the inputs of both, and for the gradient of its input the weight of the second
    assert (model.kept_bytes, model.kept_weight_bytes) == (2 * (8 * 16 + 8 * 32 + 32 * 4), 2 * 32 * 4)
    row = next(line for line in str(report).splitlines() if line.startswith("Sequential"))
    assert row.split()[-4:] == ["768", "B", "256", "B"]
    assert report.merge(report).models == [model]
