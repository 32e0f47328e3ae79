"""What the caches hold is counted, bounded and freed; nothing lives longer than the graph or its weight; and casts really are saved."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F

import hmp
from cast_cache_kit import LOW, X, Y, caches, look, loss, net
from low_kernels_kit import computes_in_float32
from oracle import kept_for_backward


@pytest.fixture(autouse=True)
def sharing_everything():
    with caches(True):
        yield


def _bytes(model):
    """Of the low-precision copies; where products compute in float32, a copy is there in float32 too."""
    return sum(p.numel() for p in model.parameters()) * (6 if computes_in_float32(LOW) else 2)


def _low_alive(*shapes):
    """How many tensors of these shapes are alive in a low-precision dtype, of those that were made since the test began."""
    return sum(type(o) is torch.Tensor and o.dtype is LOW and o.shape in shapes for o in gc.get_objects())


def _hits_and_misses(step):
    before = hmp.cache_info()
    step()
    after = hmp.cache_info()
    return after.hits - before.hits, after.misses - before.misses


def test_hits_and_misses_are_counted():
    model, x = net(), X.bfloat16()  # no activation is cast
    with torch.no_grad():
        assert [_hits_and_misses(lambda: model(x)) for _ in range(2)] == [(0, 4), (4, 0)]
    frozen = net().requires_grad_(False)
    steps = [_hits_and_misses(lambda: frozen(x.requires_grad_()).float().sum().backward()) for _ in range(3)]
    assert steps == [(0, 4), (4, 0), (4, 0)]  # where gradients flow, and the weights need none
    layer = torch.nn.Linear(16, 16)
    assert _hits_and_misses(lambda: layer(layer(layer(X.bfloat16()))).float().sum().backward()) == (2, 2)  # a layer that is used again


def test_accumulation_casts_big_weights_once_from_the_second_micro_batch_on():
    def casts(micro_batches, least):
        model, found = net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with caches(True, share_above=least):
            for _ in range(3):
                found += [_hits_and_misses(lambda: loss(model, X.bfloat16()).backward()) for _ in range(micro_batches)]
                optimizer.step()
        return found

    # the first step learns that there are micro-batches; every later one keeps the casts of its first
    assert casts(3, 1) == [(0, 0), (0, 4), (4, 0)] + [(0, 4), (4, 0), (4, 0)] * 2
    assert casts(1, 1) == [(0, 0)] * 3
    assert casts(3, 4 * 17 * 32) == [(0, 0)] * 9  # all weights are smaller
    assert casts(3, 4 * 16 * 32) == [(0, 0), (0, 1), (1, 0)] + [(0, 1), (1, 0), (1, 0)] * 2


def test_products_of_one_activation_save_it_once():
    layers = [torch.nn.Linear(1024, 8) for _ in range(3)]
    x = torch.randn(128, 1024, requires_grad=True)  # 512 KiB, which is shared beside threads too

    def forward():
        h = F.layer_norm(x, x.shape[-1:])
        return [layer(h) for layer in layers]

    with caches(False):
        apart = kept_for_backward(forward, itself=True)[0]
    with caches(True, share_above=2**19):
        together = kept_for_backward(forward, itself=True)[0]
    assert apart - together == 2 * x.numel() * 2


def test_what_is_no_number_of_bytes_is_refused():
    before = hmp.cache_info().limit
    for setter, wrong in itertools.product((hmp.set_cache_limit, hmp.set_sharing), (-1, 1.5, "1", True, torch.tensor(1))):
        with pytest.raises(hmp.HmpError, match=setter.__name__):
            setter(wrong)
        assert hmp.cache_info().limit == before


def test_the_default_limit_comes_back_with_none():
    default = hmp.cache_info().limit
    hmp.set_cache_limit(10)
    assert hmp.cache_info().limit == 10
    hmp.set_cache_limit(None)
    assert hmp.cache_info().limit == default == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def test_copies_are_freed_with_their_weights_by_a_step_and_by_whoever_asks():
    def stepped(model):
        torch.optim.AdamW(model.parameters()).step()

    other = net()
    for free in (lambda model: hmp.clear_cache(), lambda model: hmp.revert(), stepped, lambda model: model.__dict__.clear()):
        with caches(True):
            look(other)
            model = net()
            loss(model).backward()
            look(model, X.clone())
            shapes = [p.shape for p in model.parameters()]
            assert _low_alive(*shapes) == hmp.cache_info().entries == 8
            free(model)
            assert _low_alive(*shapes) == hmp.cache_info().entries
            assert hmp.cache_info()[:2] in ((0, 0), (4, _bytes(other)))


def test_a_graph_keeps_the_copy_of_an_activation_and_nothing_else_does():
    model, other, low = torch.nn.Linear(1024, 8), torch.nn.Linear(1024, 8), []
    h = F.layer_norm(torch.randn(128, 1024, requires_grad=True), (1024,))

    def pack(tensor):
        if tensor.dtype is LOW and tensor.shape == h.shape:
            low.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(h).float().sum() + other(h).float().sum()
    assert len(low) == 2
    out.backward()
    assert [reference() for reference in low] == [None] * 2, "the copy outlived the graph"


def test_without_a_graph_one_copy_is_kept_and_dies_with_its_source_or_when_asked():
    layer, shape = torch.nn.Linear(2**9, 8), (2**9, 2**9)  # 1 MiB, from which on a copy is kept
    with torch.no_grad():
        x, y = torch.randn(shape), torch.randn(shape)
        layer(x), layer(x)
        assert _low_alive(shape) == 1
        layer(y)
        assert _low_alive(shape) == 1  # only the last one
        del y
        assert _low_alive(shape) == 0
        layer(x)
        assert _low_alive(shape) == 1
        hmp.clear_cache()
        assert _low_alive(shape) == 0


@pytest.mark.slow
def test_no_copy_travels_with_a_model():
    def size(value):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.tell()

    def sizes():
        found = size(model.state_dict()), size(model), len(pickle.dumps(model))
        gc.collect()  # until torch 2.9 what saves leaves a cycle behind that holds the memory
        return found

    model = net()
    before = sizes()
    for _ in range(3):
        loss(model).backward()
    model.zero_grad()
    look(model)
    assert hmp.cache_info().entries == 4  # whoever saves a model looks at its memory: copies are made again afterwards
    assert sizes() == before
    assert vars(model[0].weight) == {}
    look(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    assert not torch.equal(look(twin), look(model))
    assert hmp.cache_info().entries == 8


def _tensors_alive():
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("steps", [40, pytest.param(5000, marks=pytest.mark.nightly)])
def test_what_is_held_stays_flat(steps):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for step in range(steps):
        for _ in range(2):
            x = torch.randn(4, 16)
            F.mse_loss(model(x).float() + model(x).float(), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
        look(model, torch.randn(4, 16))
        if step % (steps // 4) == 9:
            seen.append((hmp.cache_info()[:2], _tensors_alive()))
    # the first two may count what tests before have left and the collector has not found yet
    assert len({each[0] for each in seen}) == 1 and len(set(seen[2:])) == 1, seen


def test_a_copy_that_was_freed_leaves_its_room_to_another():
    weights = [torch.nn.Linear(32, 32, bias=False) for _ in range(4)]
    hmp.set_cache_limit(2 * _bytes(weights[0]))
    kept = []
    for each in weights[:3]:
        look(each, torch.ones(1, 32))
        kept.append(hmp.cache_info().entries)
    del each, weights[0]
    look(weights[2], torch.ones(1, 32))
    assert (kept, hmp.cache_info().entries) == ([1, 2, 2], 2)


def test_what_a_copy_costs_does_not_grow_with_how_many_there_are():
    layers, costs = [torch.nn.Linear(32, 32, bias=False) for _ in range(60)], []
    for layer in layers:
        calls = []
        sys.setprofile(lambda frame, event, _, calls=calls: calls.append(event) if event == "call" else None)
        try:
            look(layer, torch.ones(1, 32))
        finally:
            sys.setprofile(None)
        costs.append(len(calls))
    assert costs[-1] <= costs[2] + 5
