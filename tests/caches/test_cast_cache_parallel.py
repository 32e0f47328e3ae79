"""Threads, and collectives of two processes, see the weights that are, with the cast caches as without."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.distributed as dist

import hmp
from cast_cache_kit import X, assert_caches_change_nothing, assert_same_bits, caches, grads, look, loss, net, params
from hmp.caches import weight_cache
from thread_kit import in_threads

gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo")


def _at_once(*functions):
    """Runs the functions in threads that begin together."""
    barrier = threading.Barrier(len(functions))

    def begin(function):
        barrier.wait()
        function()

    in_threads(begin, functions)


def test_threads_that_cast_one_activation_agree():
    def scenario():
        models, x, seen = [net() for _ in range(3)], X.clone(), [None] * 3

        def infer(i):
            for _ in range(40):
                with torch.no_grad():
                    seen[i] = models[i](x)
                loss(models[i], x).backward()

        _at_once(*(lambda i=i: infer(i) for i in range(3)))
        return seen, [grads(m) for m in models]

    assert_caches_change_nothing(scenario)


def test_threads_that_train_while_others_infer_and_clear_agree():
    """Each on its own model, all on one cache."""

    def scenario():
        trained, frozen = [net() for _ in range(2)], net()
        seen = []

        def train(model):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            for _ in range(15):
                for _ in range(2):
                    loss(model).backward()
                look(model)
                optimizer.step()
                optimizer.zero_grad()

        def infer():
            first = look(frozen)
            for _ in range(60):
                assert torch.equal(look(frozen), first)
                if hmp.cache_info().limit:
                    hmp.clear_cache()
            seen.append(first)

        _at_once(*(lambda m=m: train(m) for m in trained), infer)
        return seen, [params(m) for m in trained]

    assert_caches_change_nothing(scenario)


def test_a_count_of_bytes_is_right_after_threads_raced():
    with caches(True):
        model = net()

        def race():
            for _ in range(60):
                look(model)
                with torch.no_grad():
                    model[0].bias.add_(0)

        _at_once(race, race, race)
        for _ in range(weight_cache._MOST_SKIPPED + 2):  # the last try may have met another thread in a call
            look(model)
        assert hmp.cache_info()[:2] == (4, 2 * sum(p.numel() for p in model.parameters()))
        hmp.clear_cache()
        assert hmp.cache_info()[:2] == (0, 0)


# What the other process does, in the order of `_COLLECTIVES`; it knows nothing of hmp
_OTHER = """
    import sys, time, torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=1, world_size=2)
    ones = lambda *shape: torch.full(shape, 3.0)
    for _ in range(2):
        dist.broadcast(ones(8, 16), 1)
        dist.broadcast(ones(8, 16), 1)
        dist.all_reduce(ones(8, 16))
        dist.reduce(ones(8, 16), 0)
        dist.send(ones(8, 16), 0)
        dist.send(ones(8, 16), 0)
        dist.scatter(torch.empty(8, 16), [ones(8, 16), ones(8, 16)], 1)
        dist.all_gather([torch.empty(8, 16), torch.empty(8, 16)], ones(8, 16))
        dist.all_gather_into_tensor(torch.empty(8, 16), ones(4, 16))
        dist.broadcast(ones(8, 16), 1)
    time.sleep(0.3)  # so that the other one runs a forward before this arrives
    dist.send(ones(8, 16), 0)
    dist.destroy_process_group()
"""
_COLLECTIVES = (
    lambda w: dist.broadcast(w, 1),
    lambda w: dist.broadcast(w.detach(), 1, async_op=True).wait(),
    lambda w: dist.all_reduce(w),
    lambda w: dist.reduce(w, 0),
    lambda w: dist.recv(w, 1),
    lambda w: dist.irecv(w.detach(), 1).wait(),
    lambda w: dist.scatter(w, None, 1),
    lambda w: dist.all_gather([torch.empty(8, 16), w.detach()], torch.ones(8, 16)),
    lambda w: dist.all_gather_into_tensor(w, torch.ones(4, 16)),
    lambda w: torch.distributed.broadcast(tensor=w, src=1),
)


@gloo
@pytest.mark.slow
@pytest.mark.parametrize("graph", [False, True])
@torch.no_grad()
def test_a_collective_that_writes_a_weight_or_an_activation_leaves_no_stale_copy(graph, tmp_path):
    store = str(tmp_path / "store")
    with caches(True), subprocess.Popen([sys.executable, "-W", "ignore", "-c", textwrap.dedent(_OTHER), store]) as other:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
        try:
            layer, by_eye = torch.nn.Linear(16, 8), torch.nn.Linear(16, 16, bias=False)
            for collective in _COLLECTIVES:  # a weight
                torch.nn.init.normal_(layer.weight)
                before = look(layer)
                collective(layer.weight)
                got = look(layer)
                hmp.clear_cache()
                assert_same_bits([got], [look(layer)])
                assert not torch.equal(before, got)
            for collective in _COLLECTIVES:  # an activation
                h = torch.randn(8, 16)
                with torch.set_grad_enabled(graph):
                    before = look(by_eye, h)  # whose graph holds the copy
                    collective(h)
                    assert_same_bits([look(by_eye, h)], [look(by_eye, h.clone())])
                    assert not torch.equal(before, look(by_eye, h))
            torch.nn.init.normal_(layer.weight)
            work = dist.irecv(layer.weight, 1)
            look(layer)  # of what is there by now
            work.wait()
            assert torch.equal(layer.weight, torch.full((8, 16), 3.0))
            got = look(layer)
            hmp.clear_cache()
            assert_same_bits([got], [look(layer)])
        finally:
            dist.destroy_process_group()
            assert other.wait(60) == 0


def test_a_weight_in_memory_of_several_processes_is_never_kept():
    with caches(True):
        model = net().share_memory()
        look(model)
        for _ in range(3):
            loss(model).backward()
        assert hmp.cache_info().entries == 0
