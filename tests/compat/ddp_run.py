"""One of several gloo processes that Lightning starts and that train together: `python ddp_run.py STRATEGY FOLDER`.

Each writes what it saw to FOLDER/rank.pt.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from hmp.compat.lightning import HMPPrecision
from training_by_hand import batches, net, sgd

torch.set_num_threads(1)
warnings.simplefilter("ignore")


class Net(nn.Sequential):
    """The network, which notes the dtypes of its layers' outputs."""

    def __init__(self) -> None:
        super().__init__(*net())
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
            self.dtypes.add(x.dtype)
        return x


class Model(pl.LightningModule):
    """At the top of a module, where spawned processes find it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = Net(), []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.net.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        """Every rank takes every second sample, four at a time: together they take the batches of one process."""
        dataset = batches().dataset
        return DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False))

    def on_train_end(self) -> None:
        # here and not after fit(): spawned processes end with it
        found = {"weights": self.net.state_dict(), "losses": self.losses, "dtypes": sorted(map(str, self.net.dtypes))}
        torch.save(found | {"process": os.getpid()}, Path(sys.argv[2]) / f"{self.global_rank}.pt")
        if multiprocessing.parent_process() is not None:
            atexit.register(leave)  # once Lightning has sent the results home, of which its launcher misses what an error keeps back


def train(strategy: str) -> None:
    trainer = pl.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", devices=2, strategy=strategy, plugins=[HMPPrecision("habana")],
        use_distributed_sampler=False,  # Lightning's own shuffles
    )  # fmt: skip
    trainer.fit(Model())
    leave()


def leave() -> NoReturn:
    """Ends the process while the model, and so its group, lives, and before Python ends gloo's threads where they wait for the GIL, which
    aborts it ("terminate called without an active exception").

    The last reference to a gloo group waits, with the GIL, for gloo's threads; one of them may be waiting for the GIL to drop what
    backward() put into the thread's state (ProcessGroupGloo's destructor in torch 2.13, with hmp or without it).
    """
    os._exit(0)


if __name__ == "__main__":
    train(sys.argv[1])
