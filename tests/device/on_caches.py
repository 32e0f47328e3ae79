"""Copies of casts on the device: never of another time, on one stream or several, in one thread or several, and no memory that grows.

Each test is inside one `casts()` block: outside of one, and of a model's call, each use is a cast of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import hmp
from device_kit import (
    BF16,
    DEVICE,
    F32,
    ON_CPU,
    WIDTH,
    Net,
    Plain,
    all_same,
    allocated,
    batch,
    gradients,
    lists,
    loss_of,
    on_cuda,
    parameters,
    same,
    synchronize,
)

ROUNDS = 10


def _train(net: torch.nn.Module, name: str, **options: object) -> list[torch.Tensor]:
    """Losses, gradients and weights of steps that accumulate over two batches and evaluate between."""
    kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[name]
    optimizer = kind(net.parameters(), lr=0.01, **options)
    seen = []
    for step in range(ROUNDS):
        for micro in range(2):
            x, y = batch(10 * step + micro)
            loss = loss_of(net, x, y)
            loss.backward()
            seen.append(loss.detach().clone())
        seen.extend(gradients(net))
        optimizer.step()
        optimizer.zero_grad()
        synchronize()  # XLA compiles what has piled up: the same graph for each step
        with torch.no_grad():
            seen.extend(net(batch(3)[0]).to(F32) for _ in range(2))
    return seen + parameters(net)


def test_training_equals_explicit_casts_under_every_kind_of_optimizer() -> None:
    kinds = [("SGD", {"foreach": False}), ("SGD", {"foreach": True, "momentum": 0.9}), ("AdamW", {"foreach": True})]
    if DEVICE != "xla":  # torch has no fused step for it
        kinds += [("SGD", {"fused": True}), ("AdamW", {"fused": True})]
    if not ON_CPU and DEVICE != "xla":  # a capturable step is for devices that capture
        kinds.append(("AdamW", {"capturable": True}))
        kinds.append(("AdamW", {"capturable": True, "fused": True}))
    for name, options in kinds:
        want = _train(Plain(), name, **options)
        with hmp.casts(lists()):
            got = _train(Net(), name, **options)
        all_same(got, want, f"{name} {options}")


STREAMS = "other devices have no streams here"


@on_cuda(STREAMS)
def test_a_weight_cast_on_one_stream_is_used_on_another() -> None:
    """The first stream is busy when the weight is written there, cast there and used on the second, which waits for it."""
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    weight, x = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH, device=DEVICE)), torch.ones(8, WIDTH, device=DEVICE)
    results: list[tuple[int, torch.Tensor]] = []
    synchronize()
    with hmp.casts(lists()), torch.no_grad():
        for number in range(1, ROUNDS + 1):
            writer, reader = (one, two) if number % 2 else (two, one)
            with torch.cuda.stream(writer):
                torch.cuda._sleep(2_000_000)
                weight.fill_(number)
                results.append((number, F.linear(x, weight)))
                results.append((number, F.linear(x, weight)))
            reader.wait_stream(writer)
            with torch.cuda.stream(reader):
                results.append((number, F.linear(x, weight)))
                torch.cuda._sleep(2_000_000)
                results.append((number, F.linear(x, weight)))
            writer.wait_stream(reader)  # the next round writes
    synchronize()
    # small integers: exact in bfloat16 as sums of 256 equal ones
    for number, result in results:
        same(result, torch.full_like(result, number * WIDTH), f"round {number}")


@on_cuda(STREAMS)
def test_a_copy_in_use_on_a_stream_is_not_given_to_another() -> None:
    """While one stream is yet to read the cast weight, the weight is written and its freed memory would be filled by the other stream."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    weight, x = torch.nn.Parameter(torch.ones(WIDTH, WIDTH, device=DEVICE)), torch.ones(8, WIDTH, device=DEVICE)
    results, kept = [], []
    with hmp.casts(lists()), torch.no_grad():
        for number in range(1, ROUNDS + 1):
            F.linear(x, weight)
            F.linear(x, weight)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                torch.cuda._sleep(5_000_000)
                results.append((number, F.linear(x, weight)))
            done = side.record_event()
            hmp.memory.clear_cache()  # frees every copy
            kept.append([torch.full((WIDTH, WIDTH), -1.0, dtype=BF16, device=DEVICE) for _ in range(4)])
            current.wait_event(done)
            weight.fill_(number + 1)
    synchronize()
    for number, result in results:
        same(result, torch.full_like(result, number * WIDTH), f"round {number}")


@on_cuda("other devices' allocators do not tell what they gave out")
def test_device_memory_does_not_grow_over_steps() -> None:
    """After the tenth and the fortieth step as much is allocated, and after revert() as much as before."""
    net, (x, y) = Net(), batch()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)

    def steps(count: int) -> int:
        for _ in range(count):
            loss_of(net, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                net(x)
        return allocated()

    with hmp.casts(lists()):
        steps(1)  # libraries take what they work in
    plain = steps(10)
    with hmp.casts(lists()):
        ten, forty = steps(10), steps(30)
    reverted = steps(1)
    assert ten == forty, (ten, forty)
    assert reverted == plain, (plain, reverted)
    print(f"allocated after ten plain steps {plain:,} bytes, ten with hmp {ten:,}, forty {forty:,}, after revert() {reverted:,}")
