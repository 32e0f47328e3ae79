"""Threads see the weights that are, with the cast caches as without."""

from __future__ import annotations

import threading

import torch

import hmp
from cast_cache_kit import LOW, X, assert_same_bits, caches, grads, look, loss, net, params, run
from low_kernels_kit import computes_in_float32
from thread_kit import in_threads


def _at_once(*functions):
    """Runs the functions in threads that begin together."""
    barrier = threading.Barrier(len(functions))

    def begin(function):
        barrier.wait()
        function()

    in_threads(begin, functions)


def _race():
    """One trains, two cast one activation, one serves and clears: each on a model of its own, all on one cache."""
    trained, frozen, models, x = net(), net(), [net(), net()], X.clone()
    seen = [None] * 2

    def train():
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, fused=True)
        for _ in range(5):
            for _ in range(2):
                loss(trained).backward()
            look(trained)
            optimizer.step()
            optimizer.zero_grad()

    def cast(i):
        for _ in range(8):
            with torch.no_grad():
                seen[i] = models[i](x)
            loss(models[i], x).backward()

    def serve():
        first = look(frozen)
        for _ in range(15):
            assert torch.equal(look(frozen), first)
            if hmp.cache_info().limit:
                hmp.clear_cache()

    _at_once(train, serve, lambda: cast(0), lambda: cast(1))
    return seen, params(trained), [grads(m) for m in models], look(frozen)


def test_threads_that_train_and_infer_and_clear_agree():
    want, none = run(_race, cached=False)
    for _ in range(5):  # on a busy machine threads may disturb each other at next to every cast
        got, saved = run(_race, cached=True)
        assert_same_bits(got, want)
        if saved:
            break
    assert none == 0 < saved


def test_a_count_of_bytes_is_right_after_threads_raced():
    with caches(True):
        model = net()

        def race():
            for _ in range(30):
                look(model)
                with torch.no_grad():
                    model[0].bias.add_(0)

        _at_once(race, race, race)
        for _ in range(70):  # the last try may have met another thread in a call, and then a weight waits a while
            look(model)
        each = 6 if computes_in_float32(LOW) else 2  # a copy is there in float32 too
        assert hmp.cache_info()[:2] == (4, each * sum(p.numel() for p in model.parameters()))
        hmp.clear_cache()
        assert hmp.cache_info()[:2] == (0, 0)
