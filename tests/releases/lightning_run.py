"""What scripts written for Gaudi do under the Lightning that is installed: one process and two, on "hpu", which is the CPU.

It starts itself under `hmp run` for each, and prints what was found as JSON. The expected losses are those of plain
torch with explicit casts. Lightning 1.8 to 2.0 has Gaudi itself, where lists are arguments of its plugin; later ones have lightning_habana.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

HABANA = ("-m", "hmp", "run", "--habana", "--device-map", "hpu=cpu")


def main() -> None:
    found: dict[str, str] = {}
    for way in ("one", "two"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "ignore", *HABANA, __file__, way]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            for line in lines:
                found |= json.loads(line)
            if done.returncode or not lines:
                print(done.stdout, done.stderr, file=sys.stderr)
                found[way] = f"fails: exit status {done.returncode}, {(done.stderr.strip().splitlines() or [''])[-1]}"
    print(json.dumps(found))


if sys.argv[1:] not in (["one"], ["two"]):
    main()
    sys.exit()

warnings.simplefilter("ignore")
import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from training_by_hand import batches, forward_by_hand, net, sgd, train_by_hand  # noqa: E402

torch.set_num_threads(1)
HOME = "pytorch_lightning" if importlib.util.find_spec("pytorch_lightning") else "lightning.pytorch"
pl: Any = importlib.import_module(HOME)
RELEASE = tuple(int(each) for each in pl.__version__.split(".")[:2])
HAS_GAUDI = RELEASE < (2, 1)
BF16 = "bf16" if RELEASE < (2, 0) else "bf16-mixed"
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
SILENT = {**QUIET, "logger": False, "enable_checkpointing": False}


class Model(pl.LightningModule):
    def __init__(self, rate: float = 1.0, ranks: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.losses, self.dtypes = net(), [], set()
        self.net[2].register_forward_hook(lambda module, given, out: self.dtypes.add(str(out.dtype)))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = F.mse_loss(self.net(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate, momentum=0.5)

    def train_dataloader(self) -> Any:
        dataset = batches().dataset
        sampler = DistributedSampler(dataset, shuffle=False) if self.hparams.ranks > 1 else None
        return DataLoader(dataset, batch_size=8 // self.hparams.ranks, sampler=sampler)


def by_hand(low: torch.dtype, tanh: torch.dtype) -> list[float]:
    """The losses where linear is in `low`, tanh in a dtype of its own, and softmax in float32."""
    return train_by_hand(forward=functools.partial(forward_by_hand, low=low, tanh=tanh))[0]


# Before anything converts: Habana's plugin casts in the whole process.
FLOAT32, O1, O2 = by_hand(torch.float32, torch.float32), by_hand(torch.bfloat16, torch.bfloat16), by_hand(torch.bfloat16, torch.float32)


def said(model: Model, expected: list[float]) -> str:
    """The loss of the last step, where all losses and dtypes are as they should be."""
    assert model.dtypes == {"torch.float32" if expected is FLOAT32 else "torch.bfloat16"}, model.dtypes
    assert model.losses == expected, f"{model.losses} and not {expected}"
    assert all(weight.dtype is torch.float32 for weight in model.parameters())
    return f"{model.losses[-1]:.6f}"


def lists() -> dict[str, str]:
    Path("bf16.txt").write_text("linear\ntanh\n")
    Path("fp32.txt").write_text("softmax\n")
    return {"bf16_file_path": "bf16.txt", "fp32_file_path": "fp32.txt"}


def plugin(opt_level: str) -> Any:
    """Lightning's own with its own arguments; later ones have the same by environment variables, and hmp's for O2."""
    if HAS_GAUDI:
        given = {"opt_level": opt_level, "verbose": False, **(lists() if opt_level == "O1" else {})}
        return importlib.import_module(f"{HOME}.plugins").HPUPrecisionPlugin(precision=BF16 if RELEASE >= (2, 0) else 16, **given)
    if opt_level == "O2":
        return importlib.import_module("hmp.compat.lightning").HMPPrecision("habana-o2")
    os.environ |= {"LOWER_LIST": lists()["bf16_file_path"], "FP32_LIST": "fp32.txt"}
    return importlib.import_module("lightning_habana").HPUPrecisionPlugin(device="hpu", precision="bf16-mixed")


def trained(model: Model | None = None, load: Any = None, **given: Any) -> Model:
    model = Model() if model is None else model
    trainer = pl.Trainer(**{"accelerator": "hpu", "devices": 1, "max_epochs": 2, **SILENT, **given})
    assert type(trainer.accelerator).__name__ == "HPUAccelerator" and trainer.strategy.root_device.type == "hpu"
    trainer.fit(model, ckpt_path=load)
    return model


def plain() -> str:
    return said(trained(), FLOAT32)


def by_precision() -> str:
    return said(trained(precision=BF16), O2 if HAS_GAUDI else O1)  # its own plugin takes O2 where it is told nothing


def with_lists() -> str:
    return said(trained(plugins=[plugin("O1")]), O1)


def o2() -> str:
    return said(trained(plugins=[plugin("O2")]), O2)


def objects() -> str:
    """Accelerator and strategy made by the script."""
    own = {"accelerator": f"{HOME}.accelerators", "strategy": f"{HOME}.strategies"}
    modules = {name: importlib.import_module(module if HAS_GAUDI else "lightning_habana") for name, module in own.items()}
    made = {"accelerator": modules["accelerator"].HPUAccelerator(), "strategy": modules["strategy"].SingleHPUStrategy()}
    return said(trained(**made), FLOAT32)


def auto() -> str:
    return said(trained(accelerator="auto", devices="auto"), FLOAT32)


def names_of_lightning_habana() -> str:
    from lightning_habana.pytorch.accelerator import HPUAccelerator
    from lightning_habana.pytorch.plugins.precision import HPUPrecisionPlugin
    from lightning_habana.pytorch.strategies import SingleHPUStrategy

    given = {"accelerator": HPUAccelerator(), "strategy": SingleHPUStrategy(), "plugins": [HPUPrecisionPlugin(precision=BF16)]}
    return said(trained(**given), O2 if HAS_GAUDI else O1)


def device_stats() -> str:
    logger = importlib.import_module(f"{HOME}.loggers").CSVLogger(".", name="stats")
    monitor = importlib.import_module(f"{HOME}.callbacks").DeviceStatsMonitor()
    trained(logger=logger, callbacks=[monitor], log_every_n_steps=1)
    (log,) = Path("stats").glob("*/metrics.csv")
    names = {name.rpartition("/")[2].rpartition(".")[2] for name in log.read_text().splitlines()[0].split(",") if "DeviceStats" in name}
    assert len(names) == 10, names
    return f"{len(names)} statistics"


def checkpoints() -> str:
    """Saved by ModelCheckpoint behind the first epoch, with the optimizer's state; the second goes on as if nothing had been."""
    callback = importlib.import_module(f"{HOME}.callbacks").ModelCheckpoint("saved", save_last=True)
    trained(plugins=[plugin("O1")], max_epochs=1, callbacks=[callback], enable_checkpointing=True)
    revert()
    saved = torch.load("saved/last.ckpt", weights_only=False)["state_dict"].values()
    assert {(each.dtype, each.device.type) for each in saved} == {(torch.float32, "cpu")}
    loaded = Model.load_from_checkpoint("saved/last.ckpt")
    assert all(torch.equal(one, other) for one, other in zip(loaded.state_dict().values(), saved))  # noqa: B905
    return said(trained(plugins=[plugin("O1")], load="saved/last.ckpt"), O1[4:])


def two() -> None:
    """Two processes; both print, and the second is started by Lightning."""
    sampler = {"use_distributed_sampler" if RELEASE >= (2, 0) else "replace_sampler_ddp": False}
    strategy = importlib.import_module(f"{HOME}.strategies" if HAS_GAUDI else "lightning_habana").HPUParallelStrategy
    given = {"devices": 2, "strategy": strategy(parallel_devices=[torch.device("hpu")] * 2), "plugins": [plugin("O1")], **sampler}
    model = trained(Model(ranks=2), **given)
    rank = int(os.environ["LOCAL_RANK"])
    torch.save((model.losses, model.net.state_dict()), f"{rank}.new")
    os.rename(f"{rank}.new", f"{rank}.pt")
    torch.distributed.barrier()
    if rank == 0:
        (ours, weights), (theirs, others) = (torch.load(f"{each}.pt") for each in (0, 1))
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items()), "both have the same weights"
        together = torch.tensor([ours, theirs]).mean(0)
        assert ours != theirs and torch.allclose(together, torch.tensor(O1), rtol=2**-8), f"{together}"
        assert model.dtypes == {"torch.bfloat16"}
        print(json.dumps({"two processes": f"{together[-1]:.6f}"}), flush=True)
    os._exit(0)  # before Python ends gloo's threads where they wait for the GIL


def by_hmp() -> str:
    from hmp.compat.lightning import HMPPrecision

    trainer = pl.Trainer(accelerator="cpu", devices=1, plugins=[HMPPrecision("habana")], max_epochs=2, **SILENT)
    trainer.fit(model := Model())
    trainer.save_checkpoint("one.ckpt")
    assert torch.load("one.ckpt", weights_only=False)["HMPPrecision"]["policy"]["name"] == "habana"
    return said(model, O1)


def scoped_by_hmp() -> str:
    import hmp
    from hmp.compat.lightning import HMPPrecision

    lists()
    Path("bf16.txt").write_text("linear @ net.0\n")
    Path("fp32.txt").write_text("linear\n")
    model = Model()
    dtypes: set[torch.dtype] = set()
    model.net[0].register_forward_hook(lambda module, given, out: dtypes.add(out.dtype))
    policy = hmp.Policy.from_files(bf16="bf16.txt", fp32="fp32.txt")
    pl.Trainer(accelerator="cpu", devices=1, plugins=[HMPPrecision(policy)], max_epochs=1, gradient_clip_val=0.1, **SILENT).fit(model)
    assert (dtypes, model.dtypes) == ({torch.bfloat16}, {"torch.float32"}), (dtypes, model.dtypes)
    return "as listed"


def fabric_by_hmp() -> str:
    from hmp.compat.lightning import HMPPrecision

    fabric = importlib.import_module("lightning_fabric" if HOME == "pytorch_lightning" else "lightning.fabric").Fabric(
        accelerator="cpu", devices=1, plugins=[HMPPrecision("habana")]
    )
    network = net()
    model, optimizer = fabric.setup(network, sgd(network.parameters()))
    losses = []
    for _ in range(2):
        for x, y in batches():
            losses.append((loss := F.mse_loss(model(x), y)).item())
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
    assert losses == O1
    return f"{losses[-1]:.6f}"


def revert() -> None:
    import hmp

    if hmp.is_converted():
        hmp.revert()


def tell(**ways: Any) -> None:
    """Runs each, and prints a cell for it."""
    for name, way in ways.items():
        try:
            cell = way()
        except BaseException as error:  # the others are run too
            traceback.print_exc()
            cell = f"fails: {type(error).__name__}: {error}"
        print(json.dumps({name.replace("_", " "): cell}), flush=True)
        revert()


if __name__ == "__main__":
    if sys.argv[1] == "two":
        two()
    print(json.dumps({"release": pl.__version__, "torch": torch.__version__.partition("+")[0]}))
    tell(float32=plain, bf16=by_precision, lists=with_lists, O2=o2, objects=objects, auto=auto)
    if RELEASE >= (2, 0):
        tell(lightning_habana=names_of_lightning_habana)
    tell(DeviceStatsMonitor=device_stats, checkpoint=checkpoints)
    if not HAS_GAUDI:
        tell(HMPPrecision=by_hmp, scoped_entries=scoped_by_hmp, Fabric=fabric_by_hmp)
