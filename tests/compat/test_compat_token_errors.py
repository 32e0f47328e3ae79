"""TokenErrors logs what casts do to a training step's tokens, and training goes on as if it were not there."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import hmp
from hmp.compat.transformers import HMPCallback, TokenErrors
from optimum_kit import ON_CPU, losses, settings

METRICS = ["hmp/logprob_error_mean", "hmp/logprob_error_max", "hmp/logprob_bias", "hmp/kl"]


pytestmark = pytest.mark.usefixtures("accelerates_precision")


def figures(low: Tensor, wide: Tensor, targets: Tensor) -> list[float]:
    """The metrics of log-probabilities of classes, one row for each target."""
    low, wide = low.double().log_softmax(-1), wide.double().log_softmax(-1)
    errors = (low - wide)[range(len(targets)), targets]
    kl = F.kl_div(low, wide, reduction="batchmean", log_target=True)
    return [float(errors.abs().mean()), float(errors.abs().max()), float(errors.mean()), float(kl)]


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, attention_dropout=0.2, **sizes))


def texts() -> list[dict[str, Tensor]]:
    rows = torch.randint(0, 99, (4, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.where(torch.arange(8) > 1, -100)} for row in rows]


def trained(folder: Path, every: int | None, **arguments: Any) -> tuple[Trainer, TokenErrors | None]:
    made = TrainingArguments(str(folder), **ON_CPU, **settings(learning_rate=1e-2, **arguments))
    trainer = Trainer(llama(), made, train_dataset=texts(), callbacks=[HMPCallback("habana")])
    metric = None if every is None else TokenErrors(trainer, every)
    if metric is not None:
        trainer.add_callback(metric)
    trainer.train()
    return trainer, metric


@pytest.mark.slow
def test_a_trainer_logs_them_and_trains_as_without_them(tmp_path: Path) -> None:
    (without, _), (trainer, metric) = trained(tmp_path / "without", None), trained(tmp_path / "with", 3)
    logged = [entry for entry in trainer.state.log_history if METRICS[0] in entry]
    assert [entry["step"] for entry in logged] == [1, 4]
    assert losses(trainer) == losses(without) and len(losses(trainer)) == 4  # dropout draws what it drew, too
    assert all(torch.equal(*pair) for pair in zip(trainer.model.parameters(), without.model.parameters(), strict=True))
    assert trainer.model.training
    batch = {name: torch.stack([each[name] for each in texts()]) for name in ("input_ids", "labels")}
    model = trainer.model.eval()
    with torch.no_grad():
        low = model(**batch).logits[:, 1:-1].flatten(0, 1)
        with hmp.disable_casts():
            wide = model(**batch).logits[:, 1:-1].flatten(0, 1)
    assert [logged[-1][name] for name in METRICS] == pytest.approx(figures(low, wide, batch["labels"][:, 2:].flatten()), rel=1e-4)
    assert metric is not None and metric.latest is not None
    assert (metric.latest.tokens, metric.latest.of) == (24, "labels, shifted by one as in the model's loss")


class Classifier(nn.Module):
    """All that draws, counts and averages in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def fitted(folder: Path, training_step: Any, metrics: list[Any], epochs: int, rows: int, **more: Any) -> tuple[Any, list[dict[str, str]]]:
    """A LightningModule of a Classifier after that training, and what its logger got of the metrics."""
    kit = pytest.importorskip("lightning_kit")
    home = "lightning.pytorch"
    pytorch = kit.HOMES[home]

    class Body(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses, self.automatic_optimization = Classifier(), [], training_step is not by_hand

        def configure_optimizers(self) -> Any:
            parts = [self.net.body, self.net.head] if training_step is by_hand else [self.net]
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    Body.training_step = training_step
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(rows, 8), torch.arange(rows) % 4)
    given = {"logger": pytorch.loggers.CSVLogger(folder, name="", version="")} | more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = kit.trainer(home, kit.plugin("torch-cpu"), callbacks=metrics, max_epochs=epochs, **given)
        run.fit(model := Body(), torch.utils.data.DataLoader(data, batch_size=4))
    log = folder / "metrics.csv"
    return model, [row for row in csv.DictReader(log.read_text().splitlines()) if row[METRICS[0]]] if log.exists() else []


def automatic(self: Any, batch: Any, index: int) -> Tensor:
    x, y = batch
    loss = F.cross_entropy(self.net(x), y)
    self.losses.append(loss.item())
    return loss


def by_hand(self: Any, batch: Any, index: int) -> None:
    """The first batch has one step and the others two, so that their count is never even again."""
    x, y = batch
    self.manual_backward(F.cross_entropy(self.net(x), y))
    for optimizer in self.optimizers()[: 1 if index == 0 else 2]:
        optimizer.step()


def test_lightnings_loggers_get_them_and_it_trains_as_without_them(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from hmp.compat.lightning import TokenErrors as Callback

    metric, given = Callback(every=2), {"epochs": 2, "rows": 24, "accumulate_grad_batches": 2}
    (without, _), (model, rows) = fitted(tmp_path / "0", automatic, [], **given), fitted(tmp_path, automatic, [metric], **given)
    assert model.losses == without.losses and len(model.losses) == 12
    assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), without.state_dict().values(), strict=True))
    assert [row["step"] for row in rows] == ["0", "2", "4"]  # optimizer steps that were done
    assert metric.latest is not None and [float(rows[-1][name]) for name in METRICS] == list(metric.latest.metrics().values())
    assert metric.latest.tokens == 4 and metric.latest.error_mean > 0
    with pytest.raises(hmp.HmpError, match="TokenErrors logs to the trainer's logger, and there is none"):
        fitted(tmp_path, automatic, [Callback()], **given, logger=False)
    # with several optimizers every so many of their steps
    _, rows = fitted(tmp_path / "2", by_hand, [Callback(every=2)], epochs=1, rows=16)
    assert [row["step"] for row in rows] == ["1", "5", "7"]
