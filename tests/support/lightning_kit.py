"""The tiny model of training_by_hand for Trainers and Fabrics of either package."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from training_by_hand import batches, net, sgd

if importlib.util.find_spec("lightning") is None:
    pytest.skip("these tests run real Trainers", allow_module_level=True)


class _Packages(dict[str, Any]):
    """Imported when a test asks for one, which takes seconds: every process collects all tests, and few run these."""

    def __init__(self, *names: str) -> None:
        super().__init__(dict.fromkeys(names))

    def __getitem__(self, name: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = importlib.import_module(name)
        logging.getLogger(name).setLevel(logging.ERROR)
        return package


HOMES = _Packages("lightning.pytorch", "pytorch_lightning")
FABRICS = _Packages("lightning.fabric", "lightning_fabric")


def _both(packages: _Packages) -> pytest.MarkDecorator:
    """The test with lightning's own package, and nightly with the other, which is the same code."""
    first, *others = packages
    return pytest.mark.parametrize("home", [first, *(pytest.param(home, marks=pytest.mark.nightly) for home in others)])


both_homes, both_fabrics = _both(HOMES), _both(FABRICS)

quiet = pytest.mark.filterwarnings(
    "ignore::UserWarning:(lightning|pytorch_lightning)", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

Recorded = list[tuple[str, torch.dtype]]


class Steps:
    """The body of a LightningModule: every step notes the dtype that the network computed in, and every training step its loss."""

    net: nn.Module
    log: Callable[..., None]

    def prepare(self, optimizer: Callable[..., torch.optim.Optimizer] = sgd) -> None:
        self.net = net()
        self.make_optimizer = optimizer
        self.losses: list[float] = []
        self.dtypes: Recorded = []

    def loss(self, batch: Any, step: str) -> torch.Tensor:
        x, y = batch
        out = self.net(x)
        self.dtypes.append((step, self.net[2](torch.tanh(self.net[0](x))).dtype))  # type: ignore[index]
        return F.mse_loss(out.float(), y)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch, "train")
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.loss(batch, "validate")

    def test_step(self, batch: Any, index: int) -> None:
        self.loss(batch, "test")

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.loss(batch, "predict")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.net.parameters())


def module(home: str, body: type[Steps] = Steps, **kwargs: Any) -> Any:
    """A LightningModule of that package with this body."""
    made = type("Model", (body, HOMES[home].LightningModule), {"prepare_data_per_node": True})()
    made.prepare(**kwargs)
    return made


def trainer(home: str, *plugins: Any, **kwargs: Any) -> Any:
    """A Trainer on the CPU that writes and prints nothing unless it is told to."""
    quiet_ones = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "plugins": list(plugins), **quiet_ones}
    return HOMES[home].Trainer(**usual | kwargs)


def fit(home: str, *plugins: Any, model: Any = None, **kwargs: Any) -> Any:
    """The model after Trainer.fit; without plugins, and without precision=, in float32."""
    model = module(home) if model is None else model
    trainer(home, *plugins, **kwargs).fit(model, batches())
    return model


def plugin(policy: Any = "habana", **kwargs: Any) -> Any:
    return hmp_precision()(policy, **kwargs)


def hmp_precision() -> Any:
    """The class, whose module imports both packages."""
    for packages in (HOMES, FABRICS):
        for name in packages:
            packages[name]
    return importlib.import_module("hmp.compat.lightning").HMPPrecision
