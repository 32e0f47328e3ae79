"""Scoped lines reach modules through the wrappers of trainers and libraries, which put a name of their own into the path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import hmp

LOW, WIDE = torch.bfloat16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's wrappers


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        self.seen = y.dtype
        return y.float()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def compiled(module: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(module, backend="eager")


def inside(path: str, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[Net], torch.nn.Module]:
    """Wraps the module at that path of the model."""

    def wrapped(model: Net) -> torch.nn.Module:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, wrap(model.get_submodule(path)))
        return model

    return wrapped


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp(module: torch.nn.Module) -> torch.nn.Module:
    return torch.distributed.fsdp.FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def peft(model: torch.nn.Module) -> torch.nn.Module:
    library = pytest.importorskip("peft")
    return library.get_peft_model(model, library.LoraConfig(target_modules=["fc"], r=2))


WRAPPERS: dict[str, Callable[[Net], torch.nn.Module]] = {
    "checkpoint_wrapper of a layer": inside("layers.0.fc", checkpoint_wrapper),
    "two wrappers": inside("layers.0", lambda block: checkpoint_wrapper(checkpoint_wrapper(block))),
    "torch.compile of a model with a checkpoint_wrapper": lambda model: compiled(inside("layers.0", checkpoint_wrapper)(model)),
    "DataParallel": torch.nn.DataParallel,
    "AveragedModel": AveragedModel,
    "FSDP": lambda model: fsdp(inside("layers.0", fsdp)(model)),
    "DDP of a model with wrappers": lambda model: ddp(inside("layers.0", lambda block: compiled(checkpoint_wrapper(block)))(model)),
    "PEFT": peft,
}


@pytest.mark.parametrize(
    ("name", "scope", "order"),
    [
        ("checkpoint_wrapper of a layer", "layers.0.fc", "applied first"),
        ("two wrappers", "*.0", "wrapped first"),
        ("torch.compile of a model with a checkpoint_wrapper", "layers.0", "wrapped first"),
        ("DataParallel", "layers.0.fc", "wrapped first"),
        ("AveragedModel", "*.0", "wrapped first"),  # it holds a copy of the model
        ("FSDP", "layers.0", "wrapped first"),
        ("FSDP", "layers.0.fc", "applied first"),
        ("DDP of a model with wrappers", "*.0", "applied first"),
        ("PEFT", "layers.0", "wrapped first"),
    ],
)
@pytest.mark.usefixtures("_one_process", "fresh_compiler")
def test_a_scope_names_modules_as_the_model_itself_does(name: str, scope: str, order: str) -> None:
    model: torch.nn.Module = Net()
    blocks = list(model.layers)
    policy = hmp.Policy("scoped", bf16={f"linear @ {scope}"})
    if order == "applied first":
        hmp.apply(model, policy)
        model = WRAPPERS[name](model)
    else:
        model = hmp.apply(WRAPPERS[name](model), policy)
    model(torch.ones(2, 4))
    blocks = list(model.module.layers) if name == "AveragedModel" else blocks
    assert [block.seen for block in blocks] == [LOW, WIDE]


def test_a_module_of_the_users_with_a_child_of_such_a_name_is_no_wrapper() -> None:
    """Its child has a path of its own: `linear @ module` is not `linear` of the whole model."""

    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.fc = torch.nn.Sequential(Block()), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.module(x))

    model = Mine()
    with pytest.raises(hmp.OpListError, match="matches no module"):
        hmp.apply(model, hmp.Policy("scoped", bf16={"linear @ 0"}))
    hmp.apply(model, hmp.Policy("scoped", bf16={"linear @ module"}))(torch.ones(2, 4))
    assert (model.module[0].seen, model.fc.seen) == (LOW, WIDE)
