"""P3, copies are never stale, and counted: whoever writes, whoever holds, in whatever order.

Oracle: each product is what plain torch computes of fresh clones with the casts written out, and so is each gradient. The shapes are those
that hmp keeps as it is shipped: activations of 1 MiB, weights of a few KiB, so that a product is cheap. Copies take no more than the limit;
what is kept for weights is two bytes for each element of a weight that is there; no copy is kept by anybody after clear_cache(); a reason
for a refusal is true of a holder that exists. Hits are asserted, or the lives say nothing about copies. Rules R18, R21.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import hmp
from low_kernels_kit import as_computed, processor
from memory_writers import COLLECTIVES, WRITERS
from thread_kit import without_other_threads

SIDE = 512  # a square of float32 that hmp keeps a copy of, gradient or not: 1 MiB
ROWS = 2
BF16, F16 = torch.bfloat16, torch.float16
POLICIES = {BF16: hmp.Policy("low", bf16={"linear"}), F16: hmp.Policy("half", bf16={"linear"}, dtype=F16)}
MODES = ("no_grad", "inference_mode", "training", "training with a frozen weight", "accumulation")


def fresh(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, SIDE, generator=torch.Generator().manual_seed(seed)) * 0.1


def explicit(x: torch.Tensor, weight: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """The product with the casts written out, of memory that is read now."""
    with hmp.disable_casts(), torch.no_grad():
        return as_computed(F.linear)(x.detach().clone().to(low), weight.detach().clone().to(low))


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.dtype is want.dtype and torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def check(x: torch.Tensor, weight: torch.Tensor, mode: str, low: torch.dtype, times: int = 2) -> None:
    """`times` products in that mode, each compared with the casts written out; in training its gradient too."""
    for _ in range(times):
        if mode == "no_grad":
            with torch.no_grad():
                got = F.linear(x, weight)
        elif mode == "inference_mode":
            with torch.inference_mode():
                got = F.linear(x, weight)
        elif mode == "training with a frozen weight":
            weight.requires_grad_(False)
            got = F.linear(x, weight)
            weight.requires_grad_(True)
        else:
            weight.grad = None
            got = F.linear(x, weight)
            got.float().sum().backward()
            ones = torch.ones(x.shape[0], weight.shape[0], dtype=low)
            with hmp.disable_casts():
                grad = as_computed(torch.mm)(ones.t(), x.detach().clone().to(low)).float()
            assert same(weight.grad, grad)
            if mode == "training":
                weight.grad = None
        want = explicit(x, weight, low)
        assert same(got.detach(), want), f"{mode}: the product is of another time"


def check_a_view(x: torch.Tensor, weight: torch.Tensor, low: torch.dtype) -> None:
    """A product with a view of the activation."""
    with torch.no_grad():
        assert same(F.linear(x.t(), weight), explicit(x.t(), weight, low)), "the product with a view is of another time"


BY_ELEMENT = {"apply_", "map_", "map2_", "apply_ in a thread", "data_ptr"}
ALIASES: dict[str, Any] = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "view": lambda t: t.detach().t(),
    "row": lambda t: t.detach()[-1:],
    "set_": lambda t: torch.empty(0).set_(t.detach()),
    "Parameter": lambda t: torch.nn.Parameter(t.detach()),
    "storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.detach().numpy(),
    "dlpack": lambda t: torch.from_dlpack(t.detach()),
    "numpy's dlpack": lambda t: np.from_dlpack(t.detach()),
}


def write_by(alias: Any, value: float) -> None:
    if isinstance(alias, torch.UntypedStorage):
        alias.fill_(int(abs(value)) % 60)
    elif isinstance(alias, torch.Tensor):
        alias.data.fill_(value)
    elif alias.flags.writeable:
        alias[...] = value
    else:  # numpy looks at a capsule's memory and may not write it; who made it may
        alias.view()


class Writes(RuleBasedStateMachine):
    """Weights and activations that anybody writes and everybody reads. Tensors are told apart by number; some share their memory."""

    hits = misses = 0

    def __init__(self) -> None:
        super().__init__()
        self.values = itertools.count(1)
        self.weights = [torch.nn.Parameter(fresh(1)), torch.nn.Parameter(fresh(2))]
        self.inputs = [fresh(3, SIDE), fresh(4, SIDE)]
        self.aliases: list[Any] = []
        self.everywhere, self.views_too, self.mode, self.low = True, False, "no_grad", BF16

    @initialize(
        everywhere=st.booleans(), mode=st.sampled_from(MODES), low=st.sampled_from([BF16, F16]), kernels=st.sampled_from(["", "float32"])
    )
    def start(self, everywhere: bool, mode: str, low: torch.dtype, kernels: str) -> None:
        self.everywhere, self.mode, self.low = everywhere, mode, low
        self.kernels, self.processor = kernels, contextlib.ExitStack()
        self.processor.enter_context(processor(kernels))

    def teardown(self) -> None:
        Writes.hits += hmp.cache_info().hits
        Writes.misses += hmp.cache_info().misses
        self.aliases.clear()
        hmp.revert()
        hmp.set_cache_limit(None)
        hmp.set_sharing(None)
        self.processor.close()

    def value(self) -> float:
        number = next(self.values)
        return float(number % 61) * (-1.0) ** number  # as exact in bfloat16 as in float32, and another one each time

    def target(self, number: int) -> torch.Tensor:
        tensors = [*self.weights, *self.inputs]
        return tensors[number % len(tensors)]

    @rule(mode=st.sampled_from(MODES), low=st.sampled_from([BF16, F16]), views_too=st.booleans())
    def read_otherwise(self, mode: str, low: torch.dtype, views_too: bool) -> None:
        self.mode, self.low, self.views_too = mode, low, views_too

    @invariant()
    def every_product_is_of_the_values_that_are_there(self) -> None:
        casts = hmp.casts(POLICIES[self.low])
        if self.everywhere:
            hmp.convert(policy=POLICIES[self.low])
            casts = contextlib.nullcontext()
        with casts:
            for weight, x in itertools.product(self.weights, self.inputs):
                check(x, weight, self.mode, self.low, times=1)
                if self.views_too:
                    check_a_view(x, weight, self.low)

    @rule(number=st.integers(0, 9), writer=st.sampled_from(sorted(WRITERS)))
    def write(self, number: int, writer: str) -> None:
        target = self.target(number)
        if writer == "geometry" and target.shape[0] != target.shape[1]:
            return  # it would have another shape
        if target.numel() > 4096 and writer in BY_ELEMENT:
            return  # a call of Python's for each element
        WRITERS[writer](target, self.value())

    @rule(number=st.integers(0, 9), alias=st.sampled_from(sorted(ALIASES)))
    def take(self, number: int, alias: str) -> None:
        self.aliases.append(ALIASES[alias](self.target(number)))

    @rule(number=st.integers(0, 9))
    def write_by_alias(self, number: int) -> None:
        if self.aliases:
            write_by(self.aliases[number % len(self.aliases)], self.value())

    @rule(number=st.integers(0, 9))
    def drop_alias(self, number: int) -> None:
        if self.aliases:
            del self.aliases[number % len(self.aliases)]

    @rule(w=st.integers(0, 5))
    def copy_weight(self, w: int) -> None:
        self.weights.append(copy.deepcopy(self.weights[w % len(self.weights)]))
        del self.weights[:-3]

    @rule(w=st.integers(0, 5))
    def share_memory_with(self, w: int) -> None:
        self.weights.append(torch.nn.Parameter(self.weights[w % len(self.weights)].detach()))
        del self.weights[:-3]

    @rule(w=st.integers(0, 5))
    def show_another_part(self, w: int) -> None:
        weight = self.weights[w % len(self.weights)]
        data = weight.detach()
        if data.untyped_storage().nbytes() == 8 * ROWS * SIDE:
            weight.data = data.as_strided((ROWS, SIDE), (SIDE, 1), ROWS * SIDE - data.storage_offset())
        else:
            weight.data = torch.cat([data, -data])[:ROWS]

    @rule(w=st.integers(0, 5), v=st.integers(0, 5))
    def swap(self, w: int, v: int) -> None:
        one, other = self.weights[w % len(self.weights)], self.weights[v % len(self.weights)]
        if one is not other:
            one.grad = other.grad = None
            torch.utils.swap_tensors(one, other)

    @rule(x=st.integers(0, 5), of=st.sampled_from(["clone", "view", "slice", "result"]))
    def make_input(self, x: int, of: str) -> None:
        tensor = self.inputs[x % len(self.inputs)]
        made = {"clone": tensor.clone, "view": lambda: tensor.view(SIDE, SIDE), "slice": lambda: tensor[:], "result": lambda: tensor * 1}
        self.inputs.append(made[of]())
        del self.inputs[:-2]

    @rule(what=st.sampled_from(["revert", "clear", "convert", "collect"]))
    def look_after(self, what: str) -> None:
        if what == "revert":
            hmp.revert()
        elif what == "clear":
            hmp.clear_cache()
            assert hmp.cache_info().entries == 0 == hmp.cache_info().bytes
        elif what == "convert":
            hmp.convert(policy="torch-cpu")
        else:
            gc.collect()

    @rule(limit=st.sampled_from([None, None, 0, 2 * ROWS * SIDE - 1, 2 * ROWS * SIDE, 4 * ROWS * SIDE + 1]))
    def limit(self, limit: int | None) -> None:
        hmp.set_cache_limit(limit)

    @rule(least=st.sampled_from([None, None, 0, 4 * ROWS * SIDE, 4 * ROWS * SIDE + 1, 4 * SIDE * SIDE, 4 * SIDE * SIDE + 1]))
    def share(self, least: int | None) -> None:
        hmp.set_sharing(least)

    @invariant()
    def what_is_kept_is_counted(self) -> None:
        info = hmp.cache_info()
        # two bytes an element, and four more where a processor without instructions multiplies in float32 (R11)
        least = 6 if self.kernels == "float32" else 2
        assert least * ROWS * SIDE * info.entries <= info.bytes <= min(6 * ROWS * SIDE * info.entries, info.limit)
        assert info.entries <= len(self.weights) + len(self.aliases)  # an alias keeps the memory of a weight that is gone


def run(examples: int, steps: int) -> None:
    Writes.hits = Writes.misses = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of typed storages, and of patches that somebody put back
        run_state_machine_as_test(
            Writes,
            settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)),
        )
    assert Writes.hits > examples < Writes.misses, "next to nothing was read from a copy: the lives say nothing about copies"


def test_p3_every_product_is_of_the_values_that_are_there() -> None:
    run(examples=max(3, settings.default.max_examples // 3), steps=20)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writes_the_input", [False, True], ids=["weight", "input"])
def test_p3_a_write_by_any_writer_is_seen(mode: str, writes_the_input: bool) -> None:
    """The same for each writer by itself: so that a failure says whose it is."""
    unseen = []
    with hmp.convert(policy=POLICIES[BF16]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, writer in (WRITERS | COLLECTIVES).items():
            if (name in BY_ELEMENT and writes_the_input) or (name == "geometry" and not writes_the_input):
                continue
            weight, x = torch.nn.Parameter(fresh(1)), fresh(2, SIDE)
            target = x if writes_the_input else weight
            for value in (3.0, -2.0):
                check(x, weight, mode, BF16)
                before = target.detach().clone()
                writer(target, value)
                assert not torch.equal(before, target.detach()), f"{name} wrote nothing"
                try:
                    check(x, weight, mode, BF16, times=1)
                except AssertionError:
                    unseen.append(name)
                    break
    assert not unseen


# --- what is kept, and why not


HOLDERS: dict[str, Any] = {
    "view": lambda w: w.detach(),
    "numpy": lambda w: w.detach().numpy(),
    "dlpack": lambda w: torch.from_dlpack(w.detach()),
    "storage": lambda w: w.untyped_storage(),
    "a graph that saved it": lambda w: (w * w).sum(),
    "a graph that saved a view": lambda w: F.linear(torch.randn(2, SIDE, requires_grad=True), w),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_p3_what_somebody_else_holds_is_refused_with_a_reason(holder: str) -> None:
    weight = torch.nn.Parameter(fresh(1))
    held = HOLDERS[holder](weight)  # before there is a policy
    with hmp.convert(policy=POLICIES[BF16]), torch.no_grad():
        x = fresh(2, SIDE)
        for _ in range(3):
            F.linear(x, weight)
        refused, kept = hmp.cache_info().refused, hmp.cache_info().entries
        assert sum(refused.values()) > 0 and kept == 0, f"held by {type(held)}, refused {refused}"
        del held
        for _ in range(20):  # it waits a little longer after each refusal
            F.linear(x, weight)
        assert hmp.cache_info().entries == 1 or holder == "numpy"  # torch does not tell when an array is gone


KIB = 1024
# (gradient, bytes, least by set_sharing, hits of three products)
KEPT = [(False, 1024 * KIB, None, 2), (False, 1022 * KIB, None, 0), (False, 1024 * KIB, 2**30, 2), (True, 512 * KIB, None, 2)]
KEPT += [(True, 512 * KIB, 512 * KIB, 2), (True, 512 * KIB, 512 * KIB + 1, 0), (True, 32 * KIB, None, 2), (True, 30 * KIB, None, 0)]


@pytest.mark.parametrize(("grad", "nbytes", "least", "hits"), KEPT)
def test_p3_an_activation_of_three_products_is_cast_once(grad: bool, nbytes: int, least: int | None, hits: int) -> None:
    """From 1 MiB on without a gradient, from 32 KiB on with one; and what is smaller is cast for each use."""

    def cast() -> None:
        weights = [torch.nn.Parameter(fresh(n)) for n in range(3)]
        hmp.set_sharing(least)
        with hmp.convert(policy=POLICIES[BF16]), torch.set_grad_enabled(grad):
            x = fresh(2, nbytes // (4 * SIDE)).requires_grad_(grad) * 1
            before = hmp.cache_info().hits
            results = [F.linear(x, w) for w in weights]
            assert hmp.cache_info().hits - before == hits
        for result, w in zip(results, weights, strict=True):
            assert same(result.detach(), explicit(x, w, BF16))

    without_other_threads(cast)  # beside one nothing below 512 KiB is kept


def test_p3_what_is_used_once_is_soon_not_learned_by_heart() -> None:
    """400 activations that are used once cost at most 32 + 400 / 31 + 2 copies; when three uses follow, most casts are saved again."""

    def learn() -> None:
        w = torch.nn.Parameter(torch.randn(8, 64))
        others = [torch.nn.Parameter(torch.randn(8, 64)) for _ in range(3)]
        with hmp.convert(policy="torch-cpu"):
            for _ in range(400):
                F.linear(torch.randn(256, 64, requires_grad=True) * 1, w).sum().backward()
            assert hmp.cache_info().misses <= 32 + 400 / 31 + 2
            before = hmp.cache_info().hits
            for _ in range(200):
                x = torch.randn(256, 64, requires_grad=True) * 1
                sum(F.linear(x, v).sum() for v in others).backward()
            assert hmp.cache_info().hits - before >= 900

    without_other_threads(learn)


OTHERWISE = {
    "another part": lambda data: data.as_strided((64, 64), (64, 1), 64 * 64),
    "transposed": lambda data: data.t(),
    "another part of each row": lambda data: data.as_strided((64, 64), (128, 1), 0),
    "rows backwards, as far as they go": lambda data: data.as_strided((64, 64), (1, 64), 64),
    "another sign": torch._neg_view,
}


@pytest.mark.parametrize("mode", ["no_grad", "accumulation"])
@pytest.mark.parametrize("how", OTHERWISE)
def test_p3_a_weight_that_shows_its_memory_otherwise_is_cast_anew(how: str, mode: str) -> None:
    """Nothing was written, and the copy is of what the weight showed before."""
    memory = torch.randn(2 * 64, 64)
    weight, x = torch.nn.Parameter(memory[:64]), torch.randn(2, 64)
    del memory
    with hmp.convert(policy=POLICIES[BF16]):
        for _ in range(3):
            check(x, weight, mode, BF16)
        weight.grad = None
        weight.data = OTHERWISE[how](weight.data)
        check(x, weight, mode, BF16)


@pytest.mark.parametrize("how", ["another part", "transposed", "another sign"])
@pytest.mark.parametrize("grad", [False, True])
def test_p3_an_activation_that_is_shown_otherwise_is_cast_anew(how: str, grad: bool) -> None:
    base = torch.randn(2 * SIDE, SIDE).requires_grad_(grad) * 1
    one = base[:SIDE]
    other = {"another part": base[SIDE:], "transposed": one.t(), "another sign": torch._neg_view(one)}[how]
    weight = torch.nn.Parameter(fresh(1))
    with hmp.convert(policy=POLICIES[BF16]), torch.set_grad_enabled(grad):
        for x in (one, one, other, other, one):
            assert same(F.linear(x, weight).detach(), explicit(x, weight, BF16))


def test_p3_no_more_is_kept_than_the_limit_says() -> None:
    weights, x = [torch.nn.Parameter(fresh(n)) for n in range(3)], fresh(9, 4)
    try:
        with hmp.convert(policy=POLICIES[BF16]), torch.no_grad():
            F.linear(x, weights[0])
            F.linear(x, weights[0])
            one = hmp.cache_info().bytes
            assert one > 0
            for limit, entries in ((0, 0), (one - 1, 0), (one, 1), (2 * one - 1, 1), (2 * one, 2), (None, 3)):
                hmp.clear_cache()
                hmp.set_cache_limit(limit)
                for w in weights * 40:  # after a refusal it waits a while
                    assert same(F.linear(x, w), explicit(x, w, BF16))
                assert hmp.cache_info().entries == entries, limit
                assert bool(hmp.cache_info().refused.get("limit")) or entries == 3
    finally:
        hmp.set_cache_limit(None)
