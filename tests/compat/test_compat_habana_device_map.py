"""Under a device map every call of torch that takes a device takes "hpu", or "cuda" once it is migrated; and what graphs are there."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hmp
from hmp.compat import habana
from hmp.compat.habana import device_map
from torch_snapshot import Snapshot, all_of_torch

HPU = torch.device("hpu")
X = torch.ones(2, 3)


def checkpoint() -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"x": X}, file)
    file.seek(0)
    return file


def with_default(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.set_default_device("hpu")
    try:
        return make()
    finally:
        torch.set_default_device(None)


def in_context(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with HPU:
        return make()


REFUSALS = (RuntimeError, AttributeError, AssertionError, ImportError)
# each refuses "hpu" in a torch without Habana's plugin
CALLS: dict[str, Callable[[], Any]] = {
    "torch.empty": lambda: torch.empty(2, device="hpu"),
    "torch.zeros with an index": lambda: torch.zeros(2, device="hpu:0"),
    "torch.randn": lambda: torch.randn(2, 3, device=HPU),
    "torch.empty_strided": lambda: torch.empty_strided((2,), (1,), device="hpu"),
    "torch.tril_indices": lambda: torch.tril_indices(3, 3, device="hpu"),
    "torch.fft.fftfreq": lambda: torch.fft.fftfreq(3, device="hpu"),
    "torch.zeros_like": lambda: torch.zeros_like(X, device="hpu"),
    "torch.full_like": lambda: torch.full_like(X, 2.0, device="hpu"),
    "torch.tensor": lambda: torch.tensor([1.0], device="hpu"),
    "torch.as_tensor": lambda: torch.as_tensor([1.0], device=HPU),
    "torch.asarray": lambda: torch.asarray([1.0], device="hpu"),
    "torch.sparse_coo_tensor": lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,), device="hpu", check_invariants=True),
    "torch.nested.nested_tensor": lambda: torch.nested.nested_tensor([X], device="hpu"),
    "Tensor.new_zeros": lambda: X.new_zeros(2, device="hpu"),
    "Tensor.new_tensor": lambda: X.new_tensor([1.0], device="hpu"),
    "Tensor.to": lambda: X.to("hpu"),
    "Tensor.to by keyword": lambda: X.to(device=HPU, dtype=torch.bfloat16),
    "Tensor.hpu": lambda: X.hpu(non_blocking=True),
    "Module.to": lambda: nn.Linear(2, 2).to("hpu").weight,
    "Module.hpu": lambda: nn.Linear(2, 2).hpu().weight,
    "nn.Linear": lambda: nn.Linear(2, 2, device="hpu").weight,
    "torch.Generator": lambda: torch.Generator("hpu"),
    "torch.set_default_device": lambda: with_default(lambda: torch.zeros(2)),
    "with torch.device": lambda: in_context(lambda: nn.Linear(2, 2).weight),
    "torch.load": lambda: torch.load(checkpoint(), map_location="hpu")["x"],
    "storages": lambda: X.untyped_storage().hpu(),
}


def test_every_call_lands_on_the_mapped_device_while_there_is_one() -> None:
    def all_are_refused() -> None:
        for call in CALLS.values():
            with pytest.raises(REFUSALS):
                call()

    all_are_refused()
    with habana.install("cpu"):
        for name, call in CALLS.items():
            assert call().device == torch.device("cpu"), name
    all_are_refused()


@pytest.mark.usefixtures("hpu_on_cpu")
def test_torch_device_stays_the_type_that_it_is() -> None:
    device = torch.device("hpu", 1)
    assert type(device) is torch.device
    assert (device.type, device.index) == ("hpu", 1)
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
    assert torch.device("cpu").type == "cpu"
    # what a program sees under a map, as documented
    moved = X.to(HPU)
    assert moved.device != HPU
    assert not moved.is_hpu
    assert moved is X


def test_hpu_autocast_is_the_mapped_devices_in_bfloat16() -> None:
    layer = nn.Linear(3, 2)
    with habana.install("cpu"):
        with torch.autocast(device_type="hpu", dtype=torch.bfloat16):
            assert layer(X).dtype is torch.bfloat16
            assert torch.hpu.is_autocast_hpu_enabled()
            with torch.autocast("hpu", enabled=False):
                assert layer(X).dtype is torch.float32
        assert torch.autocast(device_type="hpu", dtype=torch.bfloat16)(layer.forward)(X).dtype is torch.bfloat16
        with torch.autocast("hpu"):
            assert layer(X).dtype is torch.hpu.get_autocast_hpu_dtype() is torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert layer(X).dtype is torch.float16
    with torch.autocast(device_type="hpu", dtype=torch.bfloat16):
        assert layer(X).dtype is torch.float32
    default = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)  # the mapped device's own default
    try:
        with habana.install("cpu"):
            found = torch.autocast("cpu"), torch.autocast("hpu"), torch.autocast("hpu", torch.float16)
        assert [each.fast_dtype for each in found] == [torch.float16, torch.bfloat16, torch.float16]
    finally:
        torch.set_autocast_dtype("cpu", default)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cuda": "cpu"}, "device map 'cuda=cpu': only 'hpu' can be mapped, got 'cuda'"),
        ("hpu=tpu", "device map 'hpu=tpu': torch has no device 'tpu'"),
        ("meta", "device map 'meta': this machine has no 'meta'"),
        ("hpu=cpu:1", "device map 'hpu=cpu:1': this machine has 1 'cpu' devices"),
        (7, "device map 7: expected a string or a dict, got int"),
    ],
)
def test_a_device_map_that_cannot_be_used_says_so(given: Any, message: str) -> None:
    with pytest.raises(hmp.HmpError) as error:
        habana.install(given)
    assert message in str(error.value) and "hpu=auto" in str(error.value)
    assert not hasattr(torch, "hpu")


def test_without_a_map_hpu_says_what_is_missing() -> None:
    with habana.install(None):
        assert not torch.hpu.is_available()
        for call in (lambda: torch.zeros(2, device="hpu"), torch.hpu.synchronize):
            with pytest.raises(hmp.HmpError, match=r'device map for "hpu", got none; call .*install\(device_map="cpu"\)'):
                call()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.distributed.reduce_op warns when it is looked at
def test_uninstall_leaves_all_of_torch_as_it_was() -> None:
    before, hpu = Snapshot(all_of_torch()), habana.install("cpu")
    changed = before.differences()
    assert any("Tensor.to" in line for line in changed), changed
    hpu.uninstall()
    assert before.differences() == []
    hpu.uninstall()


@pytest.mark.usefixtures("hpu_on_cpu")
def test_models_that_are_captured_run_as_they_are() -> None:
    import habana_frameworks.torch as ht

    model = torch.nn.Linear(4, 2)
    assert ht.hpu.wrap_in_hpu_graph(model, disable_tensor_cache=True) is model
    assert ht.hpu.graphs.make_graphed_callables(model, (torch.ones(1, 4),)) is model
    assert ht.hpu.ModuleCacher(max_graphs=10)(model=model, inplace=True) is model


@pytest.mark.usefixtures("hpu_on_cpu")
def test_a_graph_without_cuda_is_an_error() -> None:
    import habana_frameworks.torch.hpu as hpu

    with pytest.raises(hmp.HmpError, match='expected "hpu" to be mapped to CUDA, got cpu, which has no graphs; run the step itself'):
        hpu.HPUGraph()


class FakeGraph:
    """CUDA's, which runs nothing while it captures: the steps that it has run."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.said.append(name)


@pytest.mark.usefixtures("hpu_on_cpu")
def test_a_captured_step_has_run_once_as_on_a_gaudi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_map, "_target", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    for dry_run, said in ((False, ["capture_begin", "capture_end", "replay"]), (True, ["capture_begin", "capture_end"])):
        graph = torch.hpu.HPUGraph()
        graph.capture_begin(dry_run=dry_run)
        graph.capture_end()
        assert graph.of_torch.said == said
