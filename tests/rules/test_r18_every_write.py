"""R18: a copy is never stale. Whoever writes, in whatever order: each product is what plain torch computes with the casts written out."""

from __future__ import annotations

import contextlib
import copy
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
from low_kernels_kit import as_computed
from memory_writers import COLLECTIVES, WRITERS

SIZE = 96  # a square of float32 that is large enough to be shared: 36,864 bytes
BF16, F16 = torch.bfloat16, torch.float16
POLICIES = {BF16: hmp.Policy("low", bf16={"linear"}), F16: hmp.Policy("half", bf16={"linear"}, dtype=F16)}
MODES = ("no_grad", "inference_mode", "training", "training with a frozen weight", "accumulation")


def fresh(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 0.1


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
            ones = torch.ones(SIZE, SIZE, dtype=low)
            with hmp.disable_casts():
                grad = as_computed(torch.mm)(ones.t(), x.detach().clone().to(low)).float()
            assert same(weight.grad, grad)
            if mode == "training":
                weight.grad = None
        want = explicit(x, weight, low)
        assert same(got.detach(), want), f"{mode}: the product is of another time"


def check_a_view(x: torch.Tensor, weight: torch.Tensor, low: torch.dtype) -> None:
    """A product with a view of the weight, which is no weight: its cast is shared as an activation's."""
    with torch.no_grad():
        assert same(F.linear(x, weight.t()), explicit(x, weight.t(), low)), "the product with a view is of another time"


ALIASES: dict[str, Any] = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "view": lambda t: t.detach().t(),
    "row": lambda t: t.detach()[2:5],
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

    hits = 0

    def __init__(self) -> None:
        super().__init__()
        self.values = itertools.count(1)
        self.weights = [torch.nn.Parameter(fresh(1)), torch.nn.Parameter(fresh(2))]
        self.inputs = [fresh(3), fresh(4)]
        self.aliases: list[Any] = []
        self.everywhere, self.views_too, self.mode, self.low = True, False, "no_grad", BF16

    @initialize(everywhere=st.booleans(), mode=st.sampled_from(MODES), low=st.sampled_from([BF16, F16]))
    def start(self, everywhere: bool, mode: str, low: torch.dtype) -> None:
        self.everywhere, self.mode, self.low = everywhere, mode, low

    def teardown(self) -> None:
        Writes.hits += hmp.cache_info().hits
        hmp.revert()
        hmp.set_cache_limit(None)

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
        WRITERS[writer](self.target(number), self.value())

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
        del self.weights[:-4]

    @rule(w=st.integers(0, 5), transposed=st.booleans())
    def share_memory_with(self, w: int, transposed: bool) -> None:
        data = self.weights[w % len(self.weights)].detach()
        self.weights.append(torch.nn.Parameter(data.t() if transposed else data))
        del self.weights[:-4]

    @rule(w=st.integers(0, 5))
    def show_another_part(self, w: int) -> None:
        weight = self.weights[w % len(self.weights)]
        data = weight.detach()
        if data.untyped_storage().nbytes() == 8 * SIZE * SIZE:
            weight.data = data.as_strided((SIZE, SIZE), (SIZE, 1), SIZE * SIZE - data.storage_offset())
        else:
            weight.data = torch.cat([data, -data])[:SIZE]

    @rule(w=st.integers(0, 5), v=st.integers(0, 5))
    def swap(self, w: int, v: int) -> None:
        one, other = self.weights[w % len(self.weights)], self.weights[v % len(self.weights)]
        if one is not other:
            one.grad = other.grad = None
            torch.utils.swap_tensors(one, other)

    @rule(x=st.integers(0, 5), of=st.sampled_from(["clone", "view", "slice", "result"]))
    def make_input(self, x: int, of: str) -> None:
        tensor = self.inputs[x % len(self.inputs)]
        made = {"clone": tensor.clone, "view": lambda: tensor.view(SIZE, SIZE), "slice": lambda: tensor[:], "result": lambda: tensor * 1}
        self.inputs.append(made[of]())
        del self.inputs[:-4]

    @rule(what=st.sampled_from(["revert", "clear", "convert", "no limit", "limit", "collect"]))
    def look_after(self, what: str) -> None:
        if what == "revert":
            hmp.revert()
        elif what == "clear":
            hmp.clear_cache()
        elif what == "convert":
            hmp.convert(policy="torch-cpu")
        else:
            hmp.set_cache_limit(None if what == "no limit" else 2 * SIZE * SIZE)


def run(examples: int, steps: int) -> None:
    Writes.hits = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of typed storages, and of patches that somebody put back
        run_state_machine_as_test(
            Writes,
            settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)),
        )
    assert Writes.hits > examples, "next to nothing was read from a copy: the lives say nothing about copies"


def test_r18_every_product_is_of_the_weights_that_are_there() -> None:
    run(examples=4, steps=40)


@pytest.mark.nightly
def test_r18_every_product_is_of_the_weights_that_are_there_in_long_lives() -> None:
    run(examples=60, steps=80)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writes_the_input", [False, True], ids=["weight", "input"])
def test_r18_a_write_by_any_writer_is_seen(mode: str, writes_the_input: bool) -> None:
    """The same for each writer by itself: so that a failure says whose it is."""
    unseen = []
    with hmp.convert(policy=POLICIES[BF16]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, writer in (WRITERS | COLLECTIVES).items():
            weight, x = torch.nn.Parameter(fresh(1)), fresh(2)
            target = x if writes_the_input else weight
            for value in (3.0, -2.0, 1.0):
                check(x, weight, mode, BF16)
                before = target.detach().clone()
                writer(target, value)
                assert not torch.equal(before, target.detach()), f"{name} wrote nothing"
                try:
                    check(x, weight, mode, BF16)
                except AssertionError:
                    unseen.append(name)
                    break
    assert not unseen
