"""summary(): the dtype that each layer computes in and what it saves, beside hooks in plain torch under torch.autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
from plain_hooks import Plain, seen_by_hooks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv1d(3, 16, 3, padding=1)
        self.seen = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 4), nn.Softmax(-1))
        self.unused = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.seen(self.embed(x)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


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
        assert layer.shapes == ((plain.shapes[path],) if path in plain.shapes else ())
        assert layer.saved_bytes == plain.saved[path], path
        if not list(module.children()) and path in plain.dtypes:
            assert layer.computes == (plain.dtypes[path],), path
    assert found["blocks.0.up"].computes == ("bfloat16",)
    assert found["unused"].computes == () and found["unused"].saved_bytes == 0
    assert found.parameters == sum(p.numel() for p in net.parameters())
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
    assert "without a batch" in str(found)


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
