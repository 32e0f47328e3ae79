"""R17, the innermost wins: a policy that comes into force inside an enabled region of torch.autocast switches it off until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel

import hmp
from autocast_kit import BF16, F16, F32, HERE, OFF, real_state
from innermost_kit import FULL, Head, OwnRegion, X, assert_by_the_lists, autocast, closing_over, matmuls, write_lists
from trap_kit import policy


@pytest.fixture
def lists(tmp_path):
    return write_lists(tmp_path)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_r17_a_call_of_an_applied_model_and_casts_switch_the_region_off(lists, dtype):
    model = hmp.apply(Head(), lists)
    with autocast(dtype):
        assert_by_the_lists(model, enabled=True)
        with hmp.casts(FULL):
            assert (matmuls(), real_state()[0]) == (F32, (False, dtype))
        assert matmuls() is dtype
    assert real_state() == OFF


def test_r17_the_same_policy_inside_a_region_comes_into_force_again():
    inner = hmp.apply(nn.Linear(3, 3), policy(fp32=["linear"]))
    outer = hmp.apply(nn.Sequential(inner), policy(fp32=["linear"]))
    outer.forward = types.MethodType(lambda self, x: autocast()(self[0])(x), outer)
    assert outer(X).dtype is F32


def test_r17_scoped_lines_do_not_take_the_last_word_from_the_models_own_region(lists):
    class Decorated(Head):
        @autocast()
        def forward(self, x):
            return super().forward(x)

    for model in (OwnRegion(), Decorated()):
        hmp.apply(model, lists)
        assert model(X).dtype is BF16
        with autocast(F16):
            assert model(X).dtype is BF16


def _through(around):
    """A way of putting a region around a model's forward from outside."""

    def change(model):
        model.forward = around(model.forward)

    return change


def _kept_under_another_name(model):
    def wrapped(self, *args, **kwargs):
        with autocast():
            return self.old_forward(*args, **kwargs)

    model.old_forward = model.forward
    model.forward = types.MethodType(wrapped, model)


def _hooks(model):
    open_regions = contextlib.ExitStack()

    def before(*_):
        open_regions.enter_context(autocast())

    model.register_forward_pre_hook(before)
    model.register_forward_hook(lambda *_: open_regions.close(), always_call=True)


AROUND = [
    _through(autocast()),
    _through(closing_over),
    _through(lambda forward: functools.partial(closing_over(lambda f, *args: f(*args)), forward)),
    _kept_under_another_name,
    _hooks,
]


@pytest.mark.parametrize("applied_first", [True, False])
def test_r17_what_is_put_around_an_applied_models_forward_counts_as_outside(lists, applied_first):
    for around in AROUND:
        model = Head()
        if applied_first:
            hmp.apply(model, lists)
        around(model)
        hmp.apply(model, lists)
        assert_by_the_lists(model)
        with autocast(F16):
            assert_by_the_lists(model, enabled=True)
        assert_by_the_lists(model, lambda x, model=model: DataParallel(model)(x))
        assert_by_the_lists(hmp.apply(DataParallel(model), lists).module)


class OwnStep(Head):
    """A step that is the model's own code, to which Lightning redirects `forward` for DDP's sake."""

    def __init__(self) -> None:
        super().__init__()

        def redirected(x):
            del self.forward
            return self.training_step(x)

        self.forward = redirected

    def training_step(self, x):
        with autocast():
            return self.lm_head(self.body(x))


class OwnChild(nn.Module):
    """The user's own, though a wrapper of DDP's or Fabric's looks the same."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)

    def forward(self, x):
        with autocast():
            return self.module(x)


@pytest.mark.parametrize("applied_before", [False, True])
def test_r17_a_region_of_the_models_own_code_has_the_last_word_wherever_it_stands(applied_before):
    for own in (OwnStep, OwnChild):
        if applied_before:  # whose class follows marks then
            hmp.apply(Head(), policy(fp32=["linear"]))(X)
        with hmp.record() as report:
            assert hmp.apply(own(), policy(fp32=["linear"]))(X).dtype is BF16
        assert {each.kind for each in report.violations()} == {"region"}
        hmp.revert()


def test_r17_the_log_names_the_line_that_opened_a_region_inside(caplog):
    with autocast(), hmp.casts(FULL):
        assert not caplog.records
        for _ in range(2):
            with autocast():
                matmuls()
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    line = test_r17_the_log_names_the_line_that_opened_a_region_inside.__code__.co_firstlineno + 4
    assert f"opened at {__file__}:{line}, is enabled where hmp casts" in said


# --- the region is as it was


def test_r17_a_task_that_ends_first_does_not_switch_the_region_on_in_another():
    async def task(inside, seen):
        with hmp.casts(FULL):
            inside.set()
            await seen.wait()
            return matmuls()

    async def both():
        events = [asyncio.Event() for _ in range(4)]
        one, other = asyncio.create_task(task(*events[:2])), asyncio.create_task(task(*events[2:]))
        await events[0].wait()
        await events[2].wait()
        events[1].set()
        found = [await one]
        events[3].set()
        return [*found, await other, matmuls()]

    with autocast():
        assert asyncio.run(both()) == [F32, F32, BF16]


def test_r17_a_policy_that_lasts_from_a_disabled_block_does_not_keep_the_region_off():
    def lasting():
        with hmp.casts(FULL):
            yield

    with autocast():
        with hmp.casts(FULL), torch.autocast(HERE, enabled=False):
            generator = lasting()
            next(generator)
        assert (matmuls(), real_state()[0]) == (BF16, (True, BF16))
        generator.close()


def test_r17_the_regions_nesting_and_its_cache_of_weights_last():
    weight = nn.Parameter(torch.randn(64, 64))

    def cast_of_the_weight():
        return F.linear(torch.ones(1, 64), weight).grad_fn.next_functions[1][0].next_functions[0][0]

    with autocast():
        before = cast_of_the_weight()
        hmp.apply(nn.Linear(3, 3), FULL)(X)
        with hmp.casts(policy(bf16=["linear"])), torch.autocast(HERE, enabled=False):
            F.linear(torch.ones(1, 64), weight)
        assert cast_of_the_weight() is before
        assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (2, 1)
