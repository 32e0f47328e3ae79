"""hmp.memory.memory_stats(): Habana's ten statistics, None where a device does not say.

No CUDA device and no HPU has been asked: their mappings are fed with what torch and Habana document.
"""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

import hmp

TEN = [
    "Limit", "InUse", "MaxInUse", "NumAllocs", "NumFrees", "ActiveAllocs", "MaxAllocSize",
    "TotalSystemAllocs", "TotalSystemFrees", "TotalActiveAllocs",
]  # fmt: skip

# 40 MiB in two live tensors of three that were made, as torch.cuda.memory_stats() has it; keys as in its documentation
CUDA = {
    "allocated_bytes.all.current": 41_943_040, "allocated_bytes.all.peak": 62_914_560, "allocated_bytes.all.allocated": 62_914_560,
    "allocated_bytes.all.freed": 20_971_520, "allocation.all.current": 2, "allocation.all.peak": 3, "allocation.all.allocated": 3,
    "allocation.all.freed": 1, "active.all.current": 2, "active.all.peak": 3, "active.all.allocated": 4, "active.all.freed": 2,
    "segment.all.current": 5, "segment.all.peak": 6, "segment.all.allocated": 7, "segment.all.freed": 2, "num_alloc_retries": 0,
    "num_ooms": 0,
}  # fmt: skip


def test_the_cpu_says_three_and_none_for_the_rest():
    stats = hmp.memory.memory_stats("cpu")
    assert list(stats) == TEN
    assert all(stats[name] is None for name in TEN[3:])
    assert stats == hmp.memory.memory_stats(torch.device("cpu")) | {"InUse": stats["InUse"], "MaxInUse": stats["MaxInUse"]}


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_the_cpus_sizes_are_bytes_and_follow_what_the_process_does():
    mib = 1 << 20
    before = hmp.memory.memory_stats("cpu")
    block = torch.ones(64 * mib, dtype=torch.uint8)
    during = hmp.memory.memory_stats("cpu")
    del block
    after = hmp.memory.memory_stats("cpu")
    assert 63 * mib < during["InUse"] - before["InUse"] < 80 * mib
    assert 63 * mib < during["InUse"] - after["InUse"] < 80 * mib
    assert all(stats["MaxInUse"] >= stats["InUse"] for stats in (before, during, after))
    assert after["MaxInUse"] > during["InUse"] - 8 * mib, "the kernel keeps the peak to some pages"
    assert before["Limit"] == during["Limit"] == after["Limit"] == int(Path("/proc/meminfo").read_text().split()[1]) * 1024


def test_cudas_statistics_have_habanas_names(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: asked.append(device) or CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=85_899_345_920))
    assert hmp.memory.memory_stats("cuda:1") == {
        "Limit": 85_899_345_920,
        "InUse": 41_943_040,
        "MaxInUse": 62_914_560,
        "NumAllocs": 3,
        "NumFrees": 1,
        "ActiveAllocs": 2,
        "MaxAllocSize": None,
        "TotalSystemAllocs": 7,
        "TotalSystemFrees": 2,
        "TotalActiveAllocs": 5,
    }
    assert asked == [torch.device("cuda:1")]


def test_a_device_that_is_not_there_and_what_is_no_device_are_errors():
    for given, told in ((None, "device=None"), (2.5, "device=2.5"), ("nosuch", "device='nosuch'")):
        with pytest.raises(hmp.HmpError, match=told):
            hmp.memory.memory_stats(given)  # type: ignore[call-overload]
    if not hasattr(torch, "hpu"):
        with pytest.raises(hmp.HmpError, match=r"habana_frameworks\.torch"):
            hmp.memory.memory_stats("hpu:0")


def test_hpus_statistics_are_habanas_own(monkeypatch: pytest.MonkeyPatch):
    said = {name: index for index, name in enumerate(TEN)}
    monkeypatch.setattr(torch, "hpu", types.SimpleNamespace(memory_stats=lambda device: {**said, "Another": 1}), raising=False)
    assert hmp.memory.memory_stats("hpu") == said, "0 stays 0"
