"""P3, copies of a call are never of another time: whoever writes, in whatever order of uses, regions, modes and threads.

Oracle: each product, and each gradient, is that of plain torch with the casts written out, of memory that is read now. A write that torch
does not count is followed by `hmp.memory.clear_cache()`, but for a tensor that requires no gradient. Rules R18, R21.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import hmp
from low_kernels_kit import as_computed, processor
from thread_kit import in_thread

Tensor = torch.Tensor
Writer = Callable[[Tensor, float], Any]
SIDE = 512
BF16, F16 = torch.bfloat16, torch.float16
POLICIES = {BF16: hmp.Policy("low", bf16={"linear"}), F16: hmp.Policy("half", bf16={"linear"}, dtype=F16)}
MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "training": torch.enable_grad,
    "a frozen weight": torch.enable_grad,
}


def fresh(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, SIDE, generator=torch.Generator().manual_seed(seed)) * 0.1


def explicit(x: Tensor, weight: Tensor, low: torch.dtype) -> Tensor:
    """The product with the casts written out."""
    with hmp.disable_casts(), torch.no_grad():
        return as_computed(F.linear)(x.detach().clone().to(low), weight.detach().clone().to(low))


def is_same(got: Tensor, wanted: Tensor, scale: Tensor) -> bool:
    """Whether the two differ by no more than the order in which a kernel sums `scale`, which depends on where the memory lies."""
    got, wanted = got.detach().float(), wanted.float()
    near = (got - wanted).abs() <= 2**-6 * scale.float()
    return bool((near | (got == wanted) | (got.isnan() & wanted.isnan())).all())


def assert_of_now(x: Tensor, weight: Tensor, mode: str, low: torch.dtype) -> None:
    """A product in that mode is that of explicit casts; so are its gradients."""
    weight.requires_grad_(mode != "a frozen weight")
    with MODES[mode]():
        got = F.linear(x, weight)
    scale = explicit(x.abs(), weight.abs(), low)
    assert got.dtype is low and is_same(got, explicit(x, weight, low), scale), f"{mode}: the product is of another time"
    if not got.requires_grad:
        return
    inputs = [each for each in (x, weight) if each.requires_grad]
    found = torch.autograd.grad(got, inputs, torch.ones_like(got))
    for one, each in zip(found, inputs, strict=True):
        given = weight if each is x else x
        ones = torch.ones(len(each), len(given))
        assert is_same(one, explicit(ones, given.t(), low), explicit(ones, given.abs().t(), low)), f"{mode}: a gradient is of another time"


def by_optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Writer:
    def write(tensor: Tensor, value: float) -> None:
        alias = torch.nn.Parameter(tensor.detach())  # over the same memory
        alias.grad = torch.full_like(alias, value)
        kind([alias], lr=0.5, **options).step()

    return write


def loaded(tensor: Tensor, value: float) -> None:
    module = torch.nn.Module()
    module.register_buffer("w", tensor.detach())
    module.load_state_dict({"w": torch.full_like(tensor, value)})


def set_data(tensor: Tensor, value: float) -> None:
    tensor.data = torch.full_like(tensor.data, value)


def add_to_data(tensor: Tensor, value: float) -> None:
    tensor.data += value


def is_counted(writer: str, tensor: Tensor) -> bool:
    """Whether torch counts the write, or hmp sees it: an assignment to `.data` of parameters alone."""
    return writer != "data +=" or isinstance(tensor, torch.nn.Parameter)


def preserving(tensor: Tensor, value: float) -> None:
    with torch.autograd._unsafe_preserve_version_counter(tensor), torch.no_grad():
        tensor.fill_(value)


NO_GRAD = torch.no_grad()
WRITERS: dict[str, Writer] = {
    "fill_": NO_GRAD(lambda t, v: t.fill_(v)),
    "fill_ in inference_mode": torch.inference_mode()(lambda t, v: t.fill_(v)),
    "setitem": NO_GRAD(lambda t, v: t.__setitem__(0, v)),
    "out=": NO_GRAD(lambda t, v: torch.add(torch.full_like(t, v), 1.0, out=t.detach())),
    "foreach": NO_GRAD(lambda t, v: torch._foreach_add_([t], v)),
    "row of a view": lambda t, v: t.detach().t()[1].fill_(v),
    "aten.fill_": lambda t, v: torch.ops.aten.fill_.Scalar(t.detach(), v),
    "Parameter of the same memory": NO_GRAD(lambda t, v: torch.nn.Parameter(t.detach()).fill_(v)),
    "data =": set_data,
    "data +=": add_to_data,
    "set_": NO_GRAD(lambda t, v: t.set_(torch.full_like(t, v))),
    "init": lambda t, v: torch.nn.init.constant_(t, v),
    "load_state_dict": loaded,
    "in a thread": lambda t, v: in_thread(NO_GRAD(t.fill_), v),
    "SGD": by_optimizer(torch.optim.SGD, foreach=False),
    "SGD fused": by_optimizer(torch.optim.SGD, fused=True),
    "AdamW": by_optimizer(torch.optim.AdamW, foreach=True),
    "AdamW fused": by_optimizer(torch.optim.AdamW, fused=True),
    "AdamW fused in a thread": lambda t, v: in_thread(by_optimizer(torch.optim.AdamW, fused=True), t, v),
}
# torch counts none of these: docs/pages tells that `hmp.memory.clear_cache()` is to be called, for what requires a gradient
UNCOUNTED: dict[str, Writer] = {
    "data": lambda t, v: t.data.fill_(v),
    "numpy": lambda t, v: t.detach().numpy().fill(v),
    "dlpack": lambda t, v: torch.from_dlpack(t.detach()).fill_(v),
    "storage": lambda t, v: t.untyped_storage().fill_(60 + int(abs(v)) % 4),
    "_unsafe_preserve_version_counter": preserving,
    "data in a thread": lambda t, v: in_thread(t.data.fill_, v),
}


def left_open(policy: hmp.Policy) -> Iterator[None]:
    with hmp.casts(policy):
        yield


class Writes(RuleBasedStateMachine):
    """Weights and activations that anybody writes and everybody reads, in regions that open and close in between."""

    saved = 0

    @initialize(low=st.sampled_from([BF16, F16]), kernels=st.sampled_from(["", "float32"]), recorded=st.booleans())
    def start(self, low: torch.dtype, kernels: str, recorded: bool) -> None:
        self.number = 0
        self.weights = [torch.nn.Parameter(fresh(2, 1)), torch.nn.Parameter(fresh(2, 2))]
        self.inputs = [fresh(16, 3).requires_grad_(), fresh(SIDE, 4)]  # the first is found again, the other is cast at each use
        self.regions: list[contextlib.ExitStack] = []
        self.generators: list[tuple[Iterator[None], torch.dtype]] = []
        self.around = contextlib.ExitStack()
        self.around.enter_context(processor(kernels))
        self.report: Any = self.around.enter_context(hmp.record()) if recorded else None
        self.lows = [low]
        self.open(low)

    def open(self, low: torch.dtype) -> None:
        region = contextlib.ExitStack()
        region.enter_context(hmp.casts(POLICIES[low]))
        self.regions.append(region)
        self.lows.append(low)

    def teardown(self) -> None:
        for region in reversed(self.regions):
            region.close()
        self.around.close()
        if self.report is not None:
            Writes.saved += sum(row.casts_saved for row in self.report.rows)

    def value(self) -> float:
        self.number += 1
        return float(self.number % 61) * (-1.0) ** self.number  # as exact in bfloat16 as in float32, and another one each time

    def target(self, number: int) -> Tensor:
        return [*self.weights, *self.inputs][number % 4]

    @invariant()
    def every_product_is_of_the_values_that_are_there(self) -> None:
        for weight in self.weights:
            for x in self.inputs:
                assert_of_now(x, weight, "no_grad", self.lows[-1])

    @rule(w=st.integers(0, 1), x=st.integers(0, 1), modes=st.lists(st.sampled_from(sorted(MODES)), min_size=1, max_size=4))
    def use(self, w: int, x: int, modes: list[str]) -> None:
        for mode in modes:
            assert_of_now(self.inputs[x], self.weights[w], mode, self.lows[-1])

    @rule(w=st.integers(0, 1), x=st.integers(0, 1), mode=st.sampled_from(sorted(MODES)), low=st.sampled_from([BF16, F16]))
    def use_in_a_thread(self, w: int, x: int, mode: str, low: torch.dtype) -> None:
        def serve() -> None:
            with hmp.casts(POLICIES[low]):
                for _ in range(3):
                    assert_of_now(self.inputs[x], self.weights[w], mode, low)

        in_thread(serve)

    @rule(number=st.integers(0, 3), writer=st.sampled_from(sorted(WRITERS)))
    def write(self, number: int, writer: str) -> None:
        WRITERS[writer](self.target(number), self.value())
        if number < 3 and not is_counted(writer, self.target(number)):
            hmp.memory.clear_cache()

    @rule(number=st.integers(0, 3), writer=st.sampled_from(sorted(UNCOUNTED)))
    def write_uncounted(self, number: int, writer: str) -> None:
        UNCOUNTED[writer](self.target(number), self.value())
        if number < 3:  # the last target requires no gradient
            hmp.memory.clear_cache()

    @rule(low=st.sampled_from([BF16, F16]))
    def enter(self, low: torch.dtype) -> None:
        if len(self.regions) < 4:
            self.open(low)

    @rule()
    def leave(self) -> None:
        if len(self.regions) > 1:
            self.regions.pop().close()
            self.lows.pop()

    @rule(low=st.sampled_from([BF16, F16]))
    def leave_all_and_enter(self, low: torch.dtype) -> None:
        while self.regions:
            self.regions.pop().close()
            self.lows.pop()
        self.open(low)

    @rule(low=st.sampled_from([BF16, F16]), w=st.integers(0, 1))
    def a_generator_comes_and_goes(self, low: torch.dtype, w: int) -> None:
        generator = left_open(POLICIES[low])
        next(generator)
        assert_of_now(self.inputs[0], self.weights[w], "training", low)
        self.weights[w].data = self.weights[w].data * 0.5
        generator.close()

    @rule(w=st.integers(0, 1))
    def another_weight(self, w: int) -> None:
        self.weights[w] = torch.nn.Parameter(self.weights[1 - w].detach() * 2)

    @rule()
    def swap(self) -> None:
        """Where a copy's node of the graph is alive, torch may refuse; then nothing is swapped."""
        with contextlib.suppress(RuntimeError):
            torch.utils.swap_tensors(*self.weights)

    @rule(w=st.integers(0, 1))
    def share_memory(self, w: int) -> None:
        self.weights[w] = torch.nn.Parameter(self.weights[1 - w].detach())

    @rule(x=st.integers(0, 1), of=st.sampled_from(["clone", "result", "turned"]))
    def another_input(self, x: int, of: str) -> None:
        made = {"clone": Tensor.clone, "result": lambda t: t * 1, "turned": lambda t: t.flip(0)}[of](self.inputs[x].detach())
        self.inputs[x] = made.requires_grad_(self.inputs[x].requires_grad)


def test_p3_every_product_is_of_the_values_that_are_there() -> None:
    examples = max(4, settings.default.max_examples)
    Writes.saved = 0
    run_state_machine_as_test(
        Writes, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
    )
    assert Writes.saved > examples, "next to no cast was saved: the lives say nothing about copies"
