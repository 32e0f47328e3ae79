"""Writes to the device's memory: each is seen by the next use, and what torch's copy-on-write mark does on this memory.

hmp sets the mark where it can be trusted to be cleared (hmp/core/cast_cache/write_marks.py). The checks hold whether it marks memory of
this device or not; the probes at the end ask torch itself, without hmp, and their findings go into the results.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import hmp
import writers
from device_kit import BF16, DEVICE, ON_CPU, ON_CUDA, allocated, keeps_copies, on_cuda, one_process, same, synchronize, tensor
from hmp.core.cast_cache import address_writes, write_marks
from networks_kit import WIDTH, lists
from writers import NO_GRAD, Writer, by_optimizer


def _pinned(tensor: torch.Tensor, value: float) -> None:
    other = torch.full(tensor.shape, value, device="cpu")
    tensor.data.copy_(other.pin_memory() if ON_CUDA else other, non_blocking=True)


def _on_a_stream(tensor: torch.Tensor, value: float) -> None:
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        tensor.data.fill_(value)
    current.wait_stream(side)


def _by_a_graph(tensor: torch.Tensor, value: float) -> None:
    alias, graph = tensor.detach(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alias.fill_(value)
    graph.replay()


def _broadcast(tensor: torch.Tensor, value: float) -> None:
    """A collective of one process, which copies what another tensor holds."""
    if not dist.is_available() or not (ON_CPU or ON_CUDA):  # no backend of the device's
        tensor.data.fill_(value)
        return
    # alive until the group is gone: torch 2.7 hangs where a thread of the group's is the last to hold a tensor
    alias, values = tensor.detach(), torch.full_like(tensor, value)
    with one_process():
        dist.all_gather_into_tensor(alias, values)


WRITERS: dict[str, Writer] = writers.WRITERS | {
    "copy_ from pinned memory": _pinned,
    "index_put_": NO_GRAD(lambda t, v: t.index_put_((torch.tensor([1, 2], device=DEVICE),), torch.tensor(v, device=DEVICE))),
    "scatter_": NO_GRAD(lambda t, v: t.scatter_(0, torch.zeros(1, 4, dtype=torch.int64, device=DEVICE), v)),
    "uniform_": NO_GRAD(lambda t, v: t.uniform_(v, v + 1)),
    "dlpack's capsule": lambda t, v: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t.detach())).fill_(v),
    "vector_to_parameters": lambda t, v: torch.nn.utils.vector_to_parameters(torch.full((t.numel(),), v, device=DEVICE), [t]),
    "SGD foreach": by_optimizer(torch.optim.SGD, foreach=True),
    "AdamW foreach": by_optimizer(torch.optim.AdamW, foreach=True),
    "collective": _broadcast,
}
if ON_CUDA:
    WRITERS |= {
        "AdamW capturable": by_optimizer(torch.optim.AdamW, capturable=True),
        "AdamW capturable, fused": by_optimizer(torch.optim.AdamW, capturable=True, fused=True),
        "on another stream": _on_a_stream,
    }

# what plain torch refuses: Tensor.__dlpack_device__ knows no device of this type, and XLA's tensors have no storage to speak of
REFUSED = {
    "pretend": {"dlpack"},
    "xla": {"dlpack", "dlpack's capsule", "set_ to its storage", "storage.fill_", "storage.copy_", "SGD fused", "AdamW fused"},
}
for refused in REFUSED.get(DEVICE, ()):
    del WRITERS[refused]


def each_writer(look: Callable[[str, Writer], None]) -> str:
    """Looks at every writer, and names all that failed."""
    failures = []
    for name, writer in WRITERS.items():
        try:
            look(name, writer)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(WRITERS)} writers:\n" + "\n".join(failures)
    return f"{len(WRITERS)} writers"


def _written_between_uses(name: str, writer: Writer) -> None:
    """A weight is used thrice, written, used, three times over."""
    x, weight = tensor(8, WIDTH), torch.nn.Parameter(tensor(WIDTH, WIDTH, seed=1))
    for number in range(3):
        with torch.no_grad():
            for _ in range(3):
                F.linear(x, weight)
        with hmp.disable_casts():
            writer(weight, float(number + 2))
        _compare(x, weight, f"{name}, write {number}")


def test_every_write_is_seen_by_the_next_use_without_a_gradient() -> None:
    """As plain torch with the cast written out."""
    with hmp.convert(policy=lists()):
        said = each_writer(_written_between_uses)
        assert (hmp.cache_info().hits > 0) is keeps_copies(), hmp.cache_info()
    print(said)


def test_every_write_is_seen_by_the_next_use_with_a_gradient() -> None:
    """As a weight is used while gradients accumulate, and written by code of the user's between."""
    x = tensor(8, WIDTH)

    def look(name: str, writer: Writer) -> None:
        weight = torch.nn.Parameter(tensor(WIDTH, WIDTH, seed=1))
        for number in range(3):
            for _ in range(3):
                F.linear(x, weight).sum().backward()
            weight.grad = None
            with hmp.disable_casts():
                writer(weight, float(number + 2))
            got = F.linear(x, weight)
            with hmp.disable_casts():
                same(got, F.linear(x.to(BF16), weight.detach().to(BF16)), f"{name}, write {number}")

    with hmp.convert(policy=lists()):
        print(each_writer(look))


def _compare(x: torch.Tensor, weight: torch.Tensor, what: str) -> None:
    with torch.no_grad():
        got = [F.linear(x, weight) for _ in range(2)]
        with hmp.disable_casts():
            for one in got:
                same(one, F.linear(x.to(BF16), weight.to(BF16)), what)


def test_a_mark_that_hmp_sets_is_cleared_by_every_write() -> None:
    """Where hmp refuses to mark memory of this device, it never takes it for marked."""
    refusals = set()

    def look(name: str, writer: Writer) -> None:
        weight = torch.nn.Parameter(tensor(WIDTH, WIDTH, seed=1))
        before = weight.detach().clone()
        refusal = write_marks.mark(weight)
        refusals.add(refusal or "marked")
        assert write_marks.is_marked(weight) is not bool(refusal), refusal
        writer(weight, 3.0)
        assert not torch.equal(before, weight.detach()), "nothing was written"
        assert not write_marks.is_marked(weight), "the mark is still there"

    said = each_writer(look)
    assert ("device" in refusals) is not keeps_copies(), refusals
    print(f"{said}; hmp's marks here: {', '.join(sorted(refusals))}")


@on_cuda("other devices' allocators do not tell what they gave out")
def test_a_write_after_a_use_copies_no_memory() -> None:
    """The peak of a write to a weight that was just used is what it is without hmp: nothing of the weight's size is copied."""
    weight, x = torch.nn.Parameter(tensor(4096, 4096)), tensor(8, 4096)

    def peak_of_a_write() -> int:
        start = allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            weight.add_(1)
        synchronize()
        return int(torch.cuda.max_memory_allocated()) - start

    plain = peak_of_a_write()
    with hmp.convert(policy=lists()), torch.no_grad():
        peaks = []
        for _ in range(5):
            for _ in range(3):
                F.linear(x, weight)
            peaks.append(peak_of_a_write())
    assert max(peaks) <= plain, (plain, peaks)
    print(f"a weight of {weight.nbytes:,} bytes, peak of a write {max(peaks):,} bytes with hmp, {plain:,} without")


@on_cuda("graphs")
def test_a_write_by_a_graph_s_replay_is_seen_by_the_next_use() -> None:
    """The last of hmp's: from the first capture on no memory of the device is marked."""
    with hmp.convert(policy=lists()):
        _written_between_uses("in a graph", _by_a_graph)
        refused = hmp.cache_info().refused
    assert "captured graph" in refused, refused
    print(f"refused: {refused}")


# --- what torch's mark does on this memory: asked of torch alone ----------------------------------------------------------------


def _marked(*shape: int) -> torch.Tensor:
    """Memory of the device with torch's own mark: its clone is freed at once. NotRun where this torch or its allocator refuses."""
    if not hasattr(torch._C, "_is_cow_tensor") or not hasattr(torch, "_lazy_clone"):
        pytest.skip("this torch has no copy-on-write that Python can ask")
    made = tensor(*shape)
    try:
        torch._lazy_clone(made)
    except RuntimeError as error:
        pytest.skip(f"torch refuses to mark memory of {DEVICE}: {str(error).splitlines()[0]}")
    if not torch._C._is_cow_tensor(made):
        pytest.skip(f"torch does not mark memory of {DEVICE}")
    return made


@on_cuda("streams")
def test_probe_record_stream_on_marked_memory() -> None:
    """Whether Tensor.record_stream() still keeps freed memory from others once it is marked: the mark exchanges its deleter."""

    def given_out_early(marked: bool, watched: bool = False) -> bool:
        with address_writes.watched() if watched else nullcontext():
            return in_time(marked)

    def in_time(marked: bool) -> bool:
        torch.cuda.empty_cache()
        memory = _marked(1024, 1024) if marked else tensor(1024, 1024)
        synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            late = memory.sum()
        memory.record_stream(side)
        del memory
        # the next tensors of that size: one of them has the memory if the allocator takes it for free
        others = [torch.full((1024, 1024), 5.0, device=DEVICE) for _ in range(2)]
        synchronize()
        del others
        return bool(late.abs() > 1e6)  # the sum of fives, not of normal numbers

    plain, with_mark = given_out_early(False), given_out_early(True)
    assert not plain, "plain torch gave out memory that a stream was yet to read"
    assert not given_out_early(True, watched=True), "it is ignored while hmp watches, too"
    print(f"record_stream() {'is ignored' if with_mark else 'holds'} on marked memory")
