"""R18: what a mark on memory is to torch's ops, which waits of other threads write nothing, what a captured graph does, weak copies.

No public call sets a mark or refers weakly to a copy: products with and without them are the same.
"""

from __future__ import annotations

import copy
import dis
import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hmp
from hmp.core import torch_private
from hmp.core.cast_cache import mark_proof, write_marks
from oracle import tensors
from thread_kit import in_threads


def outcome(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    try:
        return [t.detach() for t in tensors((function(*args, **kwargs),))]
    except Exception as error:
        return type(error), str(error)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) or isinstance(other, tuple):
        return bool(one == other)
    try:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)  # lstsq differs from one run to the next
    except AssertionError:
        return False
    return True


@pytest.mark.slow
def test_r18_no_op_of_torch_minds_a_marked_input() -> None:
    """Each op of torch's table gives the same of marked inputs, in two threads too: a kernel may not clear a mark from inside a loop."""
    from torch.testing._internal.common_methods_invocations import op_db

    differing, seen = [], 0
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for op in op_db:
            if torch.float32 not in op.supported_dtypes("cpu") or "empty" in op.name:
                continue
            for sample in itertools.islice(op.sample_inputs_func(op, "cpu", torch.float32, False), 6):
                args = [sample.input, *sample.args]
                if any(t.layout is not torch.strided or t.is_nested for t in tensors((args, sample.kwargs))):
                    continue  # they have no storage, or parts
                plain, with_marks = (copy.deepcopy((args, sample.kwargs)) for _ in range(2))
                seen += sum(not write_marks.mark(t) for t in tensors(with_marks))
                if not same(outcome(op.op, *plain), outcome(op.op, *with_marks)):
                    differing.append(op.name)
    finally:
        torch.set_num_threads(threads)
    assert seen > 2000
    assert not differing


def test_r18_a_name_says_nothing_of_what_is_found_by_it() -> None:
    """`table.get("fill_")(tensor, 1)` is a call of what was found, and none of `get`."""

    class Table(dict[str, Any]):
        recv = dict.__getitem__

    table, name, done = Table(fill=torch.Tensor.fill_), "fill", [torch.zeros(1).fill_]
    calls = (
        lambda: table.get("fill")(1), lambda: table.get(name)(1, 2), lambda: table.recv("fill")(*name), lambda: done[0](table.get(1)),
        lambda: (table.get)(1)(2), lambda: (name or table.get)(1), lambda: table.get("recv")(1)(**name), lambda: table.fill(table.get(1)),
        lambda: table.get(
            "fill",
        )(1),
    )  # fmt: skip
    for call in calls:
        places = [i.offset for i in dis.get_instructions(call.__code__) if i.opname.startswith(("CALL", "PRECALL"))]
        assert not write_marks._waits((call.__code__, places[-1])), dis.Bytecode(call).dis()
    waits = lambda: table.get(name, done[0])  # noqa: E731
    is_known = any(write_marks._waits((waits.__code__, i.offset)) for i in dis.get_instructions(waits.__code__))
    assert is_known is (sys.version_info >= (3, 11))


def test_r18_no_function_that_writes_a_tensor_is_called_as_those_that_wait_are() -> None:
    owners = (torch.Tensor, torch.UntypedStorage, torch, torch._C, torch._C._nn, torch._C._VariableFunctions, torch.ops.aten)
    found = {name for owner in owners for name in dir(owner) if name.lstrip("_") in write_marks._WAITING}
    # a view, a class, and what copies or makes none
    assert found <= {"select", "device", "_get", "_join"}, found


def test_r18_a_mark_keeps_nothing_alive_of_who_asked_for_it_and_garbage_is_collected_as_before() -> None:
    """A frame that refers to itself lives until garbage is collected, and with it whatever its callers hold."""

    def caller() -> weakref.ref[torch.Tensor]:
        weight = torch.randn(4, 4)
        while write_marks.mark(weight):
            time.sleep(0.01)
        return weakref.ref(weight)

    ended = threading.Event()
    waiting = threading.Thread(target=ended.wait)
    waiting.start()
    try:
        for collecting in (True, False):
            (gc.enable if collecting else gc.disable)()
            assert caller()() is None or collecting
            assert gc.isenabled() is collecting
    finally:
        gc.enable()
        ended.set()
        waiting.join()


def test_r18_the_first_capture_frees_the_copies_and_no_memory_of_that_device_is_marked_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    class CUDAGraph:
        def capture_begin(self, *args: Any) -> None:
            begun.append(args)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(mark_proof, "_captured", set())
    own, layer, x = CUDAGraph.capture_begin, torch.nn.Linear(4, 4), torch.randn(2, 4)
    with hmp.convert(policy="torch-cpu"), torch.no_grad():
        layer(x)
        assert hmp.cache_info().entries == 2
        CUDAGraph().capture_begin("pool")
        assert hmp.cache_info().entries == 0
        assert mark_proof.refusal(torch.device("cuda")) == "captured graph"
        assert torch.equal(layer(x), torch.nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()))
    assert begun == [("pool",)]
    assert CUDAGraph.capture_begin is own


def test_a_copy_that_is_found_outlives_the_graph_that_held_it():
    """Up to torch 2.10 the last graph frees it else, in another thread at any time."""
    low = torch.ones(3, requires_grad=True) * 2
    graph, reference = low * low, torch_private.WeakTensor(low)
    del low
    found = reference()
    del graph
    assert found.sum() == 6


def test_up_to_torch_2_10_a_thread_finds_its_own_copies_alone():
    """A graph of another thread's may be freeing them: of torch's own TensorWeakRef 2.7 and 2.9 crash there, in ten lines without hmp."""
    low, found = torch.ones(3), []
    reference = torch_private.OwnWeakTensor(low)
    in_threads(lambda _: found.append(reference()), [0])
    assert found == [None] and reference() is low
