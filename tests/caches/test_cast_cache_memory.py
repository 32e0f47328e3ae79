"""What the caches hold is counted, bounded and freed; nothing lives longer than the graph or its weight; and casts really are saved."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F

import hmp
from cast_cache_kit import LOW, X, Y, caches, look, loss, net
from hmp.benchmark.saved_bytes import SavedBytes
from hmp.caches import activation_cache, weight_cache
from low_kernels_kit import computes_in_float32


@pytest.fixture(autouse=True)
def sharing_everything():
    with caches(True):
        yield


def _bytes(model):
    """Of the low-precision copies; where products compute in float32, a copy is there in float32 too."""
    return sum(p.numel() for p in model.parameters()) * (6 if computes_in_float32(LOW) else 2)


def _held():
    copies = [entry().low for entry in weight_cache._alive.values()]
    return [copy for copy in copies if copy is not None]  # an entry of another test's weight that is not collected yet


def _bytes_held():
    wide = [each for copy in _held() for each in getattr(copy.untyped_storage(), "_hmp_in_float32", [])]
    return sum(copy.untyped_storage().nbytes() for copy in [*_held(), *wide])


def _copies_of(model):
    return [weakref.ref(p.untyped_storage()._hmp_cache_entry.low) for p in model.parameters()]


def _last():
    return activation_cache._last[0]


def test_the_bytes_are_those_of_the_copies():
    model, conv = net(), torch.nn.Conv2d(3, 5, 3)
    look(model)
    assert hmp.cache_info().entries == 4
    assert hmp.cache_info().bytes == _bytes(model)
    with torch.no_grad():
        conv(torch.ones(1, 3, 4, 4))
    assert hmp.cache_info().bytes == _bytes(model) + _bytes(conv)
    assert hmp.cache_info().bytes == _bytes_held()
    with torch.no_grad():
        model[0].weight.zero_()  # a copy that is not right any more is replaced, and counted once
    look(model)
    assert hmp.cache_info()[:2] == (6, _bytes(model) + _bytes(conv))
    model[2].weight.data.zero_()
    look(model)
    assert hmp.cache_info()[:2] == (6, _bytes(model) + _bytes(conv))


def test_a_weight_has_one_copy_in_the_dtype_that_was_asked_for_last():
    model = net()
    for dtype in (torch.float16, LOW, torch.float16):
        with hmp.casts(hmp.Policy.load("torch-cpu").replace(dtype=dtype)):
            assert model(X).dtype is dtype
            look(model)
            assert hmp.cache_info()[:2] == (4, _bytes(model))
            assert {copy.dtype for copy in _held()} == {dtype}


def test_hits_and_misses_are_counted():
    model = net()
    with torch.no_grad():
        x = X.bfloat16()  # no activation is cast
        h = model[0](x)
        assert hmp.cache_info()[3:5] == (0, 2)
        model[2](h)
        assert hmp.cache_info()[3:5] == (0, 4)
        model[2](model[0](x))
        assert hmp.cache_info()[3:5] == (4, 4)


def test_frozen_weights_are_cast_once_where_gradients_flow():
    model = net().requires_grad_(False)
    for _ in range(3):
        model(X.bfloat16().requires_grad_()).float().sum().backward()
    assert hmp.cache_info()[3:5] == (8, 4)


def test_accumulation_casts_big_weights_once_from_the_second_micro_batch_on():
    def casts(micro_batches, share_above):
        with caches(True, share_above=share_above):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found = []
            for _ in range(3):
                for _ in range(micro_batches):
                    before = hmp.cache_info()
                    loss(model, X.bfloat16()).backward()
                    after = hmp.cache_info()
                    found.append((after.hits - before.hits, after.misses - before.misses))
                optimizer.step()
            return found

    # the first step learns that there are micro-batches; every later one keeps the casts of its first
    assert casts(3, 1) == [(0, 0), (0, 4), (4, 0)] + [(0, 4), (4, 0), (4, 0)] * 2
    assert casts(1, 1) == [(0, 0)] * 3
    assert casts(3, 4 * 17 * 32) == [(0, 0)] * 9  # all weights are smaller
    assert casts(3, 4 * 16 * 32) == [(0, 0), (0, 1), (1, 0)] + [(0, 1), (1, 0), (1, 0)] * 2


def test_weights_shared_by_layers_are_cast_once_a_step():
    layer = torch.nn.Linear(16, 16)
    layer(torch.tanh(layer(torch.tanh(layer(X.bfloat16()))))).float().sum().backward()
    assert hmp.cache_info().hits == 2


def _saved_bytes(forward):
    """Bytes of the storages that are saved for backward, each counted once."""
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = forward()
    del result
    return sum(found.values())


@pytest.mark.parametrize("size", [(4, 16), (128, 96)])
def test_products_of_one_activation_save_it_once(size):
    layers = [torch.nn.Linear(size[1], 8) for _ in range(3)]
    x = torch.randn(size, requires_grad=True)

    def forward():
        h = F.layer_norm(x, x.shape[-1:])
        return [layer(h) for layer in layers]

    with caches(False):
        apart = _saved_bytes(forward)
    with caches(True, share_above=8192 if x.numel() >= 8192 else 1):
        together = _saved_bytes(forward)
    assert apart - together == 2 * x.numel() * 2


def test_the_limit_bounds_the_bytes():
    model = net()
    for limit in (0, 1, 63, 64, 1000, _bytes(model) - 1, _bytes(model), 10 * _bytes(model)):
        hmp.set_cache_limit(limit)
        for _ in range(3):
            want = look(model)
            assert hmp.cache_info().bytes <= limit == hmp.cache_info().limit
            for _ in range(3):
                loss(model).backward()
            assert hmp.cache_info().bytes <= limit
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        assert torch.isfinite(want).all()
    assert hmp.cache_info().bytes == _bytes(model)


def test_a_limit_below_what_is_held_frees_it():
    model = net()
    look(model)
    copies = _copies_of(model)
    hmp.set_cache_limit(_bytes(model))
    assert hmp.cache_info().entries == 4
    hmp.set_cache_limit(_bytes(model) - 1)
    gc.collect()
    assert hmp.cache_info().bytes <= _bytes(model) - 1
    assert not any(c() is not None for c in copies)


@pytest.mark.parametrize("limit", [-1, 1.5, "1", True, False, float("inf"), torch.tensor(1), [1]])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit):
    before = hmp.cache_info().limit
    with pytest.raises(hmp.HmpError, match=r"set_cache_limit\(\) takes a number of bytes, 0 or more, or None for the default; got "):
        hmp.set_cache_limit(limit)
    assert hmp.cache_info().limit == before


def test_the_default_limit_comes_back_with_none():
    default = hmp.cache_info().limit
    hmp.set_cache_limit(10)
    assert hmp.cache_info().limit == 10
    hmp.set_cache_limit(None)
    assert hmp.cache_info().limit == default == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


@pytest.mark.parametrize("free", [hmp.clear_cache, hmp.revert], ids=["clear_cache", "revert"])
def test_copies_are_freed(free):
    model = net()
    for _ in range(3):
        loss(model).backward()
    x = X.clone()
    look(model, x)
    copies, activation = _copies_of(model), weakref.ref(_last())
    assert len(copies) == 4
    free()
    assert hmp.cache_info()[:2] == (0, 0)
    assert [c() for c in copies] == [None] * 4
    assert activation() is None


def test_a_weights_copies_die_with_it():
    model, other = net(), net()
    look(model), look(other)
    for _ in range(3):
        loss(model).backward()
    copies = _copies_of(model)
    del model
    gc.collect()
    assert [c() for c in copies] == [None] * 4
    assert hmp.cache_info()[:2] == (4, _bytes(other))
    assert len(weight_cache._alive) == 4


def test_a_step_frees_the_copies():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model).backward()
    look(model)
    copies = _copies_of(model)
    optimizer.step()
    assert hmp.cache_info().bytes == 0 and [c() for c in copies] == [None] * 4


def test_ids_that_are_used_again_are_no_hits():
    outputs = []
    with torch.no_grad():
        for i in range(200):
            weight = torch.nn.Parameter(torch.full((8, 16), float(i)))
            x = torch.full((2, 16), float(i % 7))
            outputs.append((F.linear(x, weight)[0, 0].item(), float(torch.tensor(16.0 * i * (i % 7)).to(LOW))))
            del weight, x
    assert all(got == want for got, want in outputs)
    assert hmp.cache_info().entries == 0 and not weight_cache._alive


@pytest.mark.slow
def test_a_graph_keeps_the_copy_of_an_activation_and_nothing_else_does():
    model, other = net(), net()
    x = torch.randn(4, 16, requires_grad=True)
    h = F.layer_norm(x, (16,))
    out = model(h).float().sum() + other(h).float().sum()
    low = h.untyped_storage()._hmp_cache_entry.low
    assert low() is not None
    out.backward()
    gc.collect()
    assert low() is None, "the copy outlived the graph"
    entry = weakref.ref(h.untyped_storage()._hmp_cache_entry)
    del h, out
    gc.collect()
    assert entry() is None


def test_without_a_graph_one_copy_is_kept_and_dies_with_its_source():
    model = net()
    with torch.no_grad():
        x = X.clone()
        model(x)
        model[0](x)
        first = weakref.ref(_last())
        assert torch.equal(_last(), x.to(LOW))
        y = X.clone()
        model[0](y)
        assert first() is None  # only the last one
        second = weakref.ref(_last())
        source = weakref.ref(y)
        del y
        assert source() is None and second() is None and _last() is None


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
            seen.append((hmp.cache_info()[:2], len(weight_cache._alive), _tensors_alive()))
    # the first two may count what tests before have left and the collector has not found yet
    assert len({each[:2] for each in seen}) == 1 and len(set(seen[2:])) == 1, seen


def test_a_copy_that_was_freed_leaves_its_room_to_another():
    weights = [torch.nn.Linear(32, 32, bias=False) for _ in range(4)]
    hmp.set_cache_limit(2 * _bytes(weights[0]))
    try:
        kept = []
        for each in weights[:3]:
            look(each, torch.ones(1, 32))
            kept.append(hmp.cache_info().entries)
        del each, weights[0]
        look(weights[2], torch.ones(1, 32))
        assert (kept, hmp.cache_info().entries) == ([1, 2, 2], 2)
    finally:
        hmp.set_cache_limit(None)


def test_what_a_copy_costs_does_not_grow_with_how_many_there_are():
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call"

    def made() -> int:
        nonlocal calls
        layer, calls = torch.nn.Linear(32, 32, bias=False), 0
        layers.append(layer)
        sys.setprofile(count)
        try:
            look(layer, torch.ones(1, 32))
        finally:
            sys.setprofile(None)
        return calls

    layers = []
    first, *_, last = [made() for _ in range(60)][2:]
    assert last <= first + 5


def test_counting_what_is_kept_for_backward_makes_no_copy_anew():
    layer, x = torch.nn.Linear(32, 32, bias=False), torch.ones(1, 32, dtype=LOW, requires_grad=True)
    look(layer, x)
    made = hmp.cache_info().misses
    with SavedBytes([layer.weight]).watch():
        layer(x)
    look(layer, x)
    assert made > 0 and hmp.cache_info().misses == made
