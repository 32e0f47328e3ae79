"""What hmp tells of a run on the device: times, peaks and statistics of memory; its random numbers and pinned batches are left alone."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import hmp
from device_kit import BF16, DEVICE, Net, allocated, batch, lists, on_cuda, policy, same, seed, synchronize, tensor


@on_cuda("elsewhere a call ends when its kernel does")
def test_a_synchronized_recording_counts_the_time_of_kernels() -> None:
    """Beside the device's own events: an unsynchronized recording sees the launch alone."""
    x, weight = tensor(8192, 8192), tensor(8192, 8192, seed=1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with hmp.convert(policy=lists()):
        F.linear(x, weight)
        synchronize()
        start.record()
        F.linear(x, weight)
        end.record()
        synchronize()
        found = []
        for synchronized in (False, True):
            with hmp.record(synchronize=synchronized) as report:
                F.linear(x, weight)
            synchronize()
            found.append(1000 * sum(row.op_seconds + row.cast_seconds for row in report.rows))
    events = start.elapsed_time(end)
    assert found[1] >= events / 3, (found, events)  # more than a launch
    print(f"linear of 8192 x 8192 with its casts: {events:.2f} ms by events, {found[1]:.2f} synchronized, {found[0]:.2f} not")


@on_cuda("other devices' allocators do not tell what they gave out")
def test_a_step_s_peak_is_no_higher_than_under_torch_autocast() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(DEVICE)
    x = tensor(2048, 1024)

    def peak(autocast: bool) -> int:
        for _ in range(2):
            net.zero_grad()
            start = allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast(DEVICE, dtype=BF16) if autocast else nullcontext():  # enabled=False would be the last word
                loss = net(x).float().square().mean()
            loss.backward()
            synchronize()
            found = int(torch.cuda.max_memory_allocated()) - start
            del loss
        return found

    theirs = peak(autocast=True)
    with hmp.convert(policy=policy(bf16="linear")):
        mine = peak(autocast=False)
    hmp.revert()
    plain = peak(autocast=False)
    assert mine <= 1.1 * theirs, (mine, theirs)
    print(f"hmp {mine:,} bytes, torch.autocast {theirs:,}, float32 {plain:,}")


def test_memory_statistics_are_those_of_the_allocator() -> None:
    kept = tensor(512, 512)
    found = hmp.memory.memory_stats(DEVICE)
    assert len(found) == 10, found
    module = getattr(torch, DEVICE, None)
    # on Gaudi: what the allocator tells need not be the same from one question to the next.
    if DEVICE != "hpu" and hasattr(module, "memory_allocated"):
        assert found["InUse"] == module.memory_allocated() >= kept.nbytes, found
        del kept
        later = hmp.memory.memory_stats(DEVICE)
        assert later["InUse"] == module.memory_allocated() == found["InUse"] - 2**20 and later["MaxInUse"] >= found["InUse"], later
    print(", ".join(f"{name} {value}" for name, value in found.items() if value))


def test_compare_and_verify_leave_the_devices_random_numbers_alone() -> None:
    net, (x, _) = torch.nn.Sequential(Net(), torch.nn.Dropout(0.5)), batch()
    if DEVICE == "xla":
        for call in (lambda: hmp.compare(net, (x,)), lambda: hmp.detect_nonfinite()(net)(x)):
            with pytest.raises(hmp.HmpError, match="does not support XLA"):
                call()
        pytest.skip("hmp refuses: tensors on XLA cannot be followed")
    drawn = []
    for look in (lambda: None, lambda: hmp.compare(net, (x,), policy="habana"), lambda: hmp.verify(net, (x,), policy="habana")):
        seed(1)
        found = look()
        drawn.append(torch.rand(4, device=DEVICE).tolist())
        assert found is None or any(row.op == "linear" for row in found.rows)
    assert drawn[0] == drawn[1] == drawn[2], drawn


def test_batches_of_a_data_loader_come_pinned_and_in_their_own_dtype() -> None:
    if DEVICE in ("cpu", "xla"):
        pytest.skip(f"no memory is pinned for {DEVICE}")
    net = Net()
    rows = batch()[0].cpu()
    with hmp.convert(policy=lists()), torch.no_grad():
        (pinned,) = DataLoader(list(rows), batch_size=len(rows), pin_memory=True, generator=torch.Generator())
        assert pinned.is_pinned() and pinned.dtype is torch.float32
        got = net(pinned.to(DEVICE, non_blocking=True))
        same(got, net(rows.to(DEVICE)), "a pinned batch")
        assert got.dtype is BF16
