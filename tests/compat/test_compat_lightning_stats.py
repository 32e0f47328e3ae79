"""DeviceStats logs what hmp.memory_stats() says, and Optimum's three numbers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import hmp
from lightning_kit import HOMES, DeviceStats, batches, both_homes, module, plugin, quiet, trainer

pytestmark = quiet
TOLD = {"Limit", "InUse", "MaxInUse", "memory_allocated (GB)", "max_memory_allocated (GB)", "total_memory_available (GB)"}


def logger(home: str, folder: Path) -> Any:
    return HOMES[home].loggers.CSVLogger(folder, name="", version="")


def logged(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("DeviceStats/InUse")]


@both_homes
def test_it_logs_what_the_device_says(home: str, tmp_path: Path):
    run = trainer(home, plugin(), callbacks=[DeviceStats()], logger=logger(home, tmp_path), log_every_n_steps=3)
    run.fit(module(home), batches())
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == ["3", "6"], "8 batches, every third one, counted over epochs"
    said = {name.removeprefix("DeviceStats/"): float(value) for name, value in rows[-1].items() if name.startswith("DeviceStats/")}
    assert said.keys() == TOLD, "what a CPU does not say is not logged"
    now = hmp.memory_stats("cpu")
    assert said["Limit"] == now["Limit"] and 0 < said["InUse"] <= said["MaxInUse"]
    assert said["memory_allocated (GB)"] == pytest.approx(said["InUse"] / 2**30, abs=0.006)


@both_homes
def test_a_trainer_without_a_logger_is_an_error(home: str):
    run = trainer(home, callbacks=[DeviceStats()])
    with pytest.raises(hmp.HmpError) as error:
        run.fit(module(home), batches())
    assert str(error.value) == "DeviceStats logs to the trainer's logger, and there is none; give Trainer(logger=...) one"
