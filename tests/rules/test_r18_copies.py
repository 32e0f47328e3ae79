"""R18: low-precision copies live inside one call, are never of another time, and leave nothing behind.

Oracle: the same program in plain torch with the casts written out at each use, bit for bit.
Weights are used twice a step, so that float32 sums of their gradients have one order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmp
from copies_kit import LOW, Heads, bytes_alive
from low_kernels_kit import as_computed
from optimizers import OPTIMIZERS

POLICY = hmp.Policy("low", bf16={"linear"})
HALF = hmp.Policy("half", bf16={"linear"}, dtype=torch.float16)
Cast = Callable[[Tensor], Tensor]


def by_hand(dtype: torch.dtype = LOW) -> Cast:
    return lambda tensor: tensor.to(dtype)


def plain(tensor: Tensor) -> Tensor:
    return tensor


def linear(cast: Cast, *given: Tensor) -> Tensor:
    return (F.linear if cast is plain else as_computed(F.linear))(*map(cast, given))


def once(layer: nn.Module, x: Tensor, cast: Cast) -> Tensor:
    return linear(cast, x, layer.weight, layer.bias).float()


def twice(layer: nn.Module, x: Tensor, cast: Cast) -> Tensor:
    return once(layer, once(layer, x, cast).tanh(), cast)


def made() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(16, 16), torch.randn(4, 16)


def seen_of(layer: nn.Module, x: Tensor, cast: Cast) -> list[Tensor]:
    """Products in each mode, and the gradients of a training step, which are gone afterwards."""
    with torch.no_grad():
        seen = [twice(layer, x, cast)]
    with torch.inference_mode():
        seen.append(twice(layer, x, cast))
    result = twice(layer, x, cast)
    result.square().mean().backward()
    seen += [result, *(p.grad for p in layer.parameters() if p.grad is not None)]
    for p in layer.parameters():
        p.grad = None
    return [each.detach().clone() for each in seen]


def module_of(program: Callable[[], Any]) -> nn.Module:
    """A module whose call is the program; of a class of its own, because apply() patches classes."""

    class Program(nn.Module):
        def forward(self) -> Any:
            return program()

    return Program()


def in_casts(program: Callable[[], Any]) -> Any:
    with hmp.casts(POLICY):
        return program()


def in_converted(program: Callable[[], Any]) -> Any:
    with hmp.convert(policy=POLICY):
        return module_of(program)()


REGIONS = {"casts": in_casts, "apply": lambda program: hmp.apply(module_of(program), POLICY)(), "convert": in_converted}


def assert_as_by_hand(program: Callable[[Cast], list[Tensor]], region: Callable[[Callable[[], Any]], Any] = in_casts) -> None:
    want = program(by_hand())
    got = region(lambda: program(plain))
    assert len(got) == len(want) > 0
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.dtype is other.dtype and torch.equal(one, other), f"tensor {number} is of another time"


# --- never of another time --------------------------------------------------------------------------------------------------


class WritesData(torch.optim.Optimizer):
    """As one of somebody's own: it writes through .data, also between the calls of its closure."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {})

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            result = closure()
            for p in self.param_groups[0]["params"]:
                p.data.sub_(p.grad, alpha=0.1)
        return result


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "LBFGS": lambda weights: torch.optim.LBFGS(weights, lr=0.05, max_iter=2),
    "somebody's own": WritesData,
}


def trained(make: Callable[[Any], torch.optim.Optimizer], cast: Cast) -> list[Tensor]:
    layer, x = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = make(layer.parameters())
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        for _ in range(2):  # micro-batches
            loss = twice(layer, x, cast).square().mean()
            loss.backward()
        return loss

    for _ in range(3):
        if isinstance(optimizer, (torch.optim.LBFGS, WritesData)):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        seen += [p.detach().clone() for p in layer.parameters()] + seen_of(layer, x, cast)
    return seen


def test_r18_each_optimizer_inside_one_region_around_the_loop() -> None:
    failures = []
    with hmp.convert(policy=hmp.Policy("nothing listed")):  # so that torch is patched once
        for name, make in MAKERS.items():
            try:
                want = trained(make, by_hand())
            except (TypeError, RuntimeError, ValueError):  # it has no such way on this device
                assert "-" in name
                continue
            with hmp.casts(POLICY):
                got = trained(make, plain)
            failures += [name] * (not all(map(torch.equal, got, want)))
    assert not failures


def test_r18_a_step_that_is_called_past_its_class() -> None:
    """With casts off, too, as a wrapper of a training loop may do."""

    def program(cast: Cast) -> list[Tensor]:
        layer, x = made()
        optimizer, seen = torch.optim.AdamW(layer.parameters(), lr=0.05, fused=True), []
        for number in range(4):
            twice(layer, x, cast).square().mean().backward()
            with hmp.disable_casts() if number % 2 else contextlib.nullcontext():
                held(optimizer)
            optimizer.zero_grad()
            seen += seen_of(layer, x, cast)
        return seen

    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch hooks the class's step when its first instance is made
    hmp.revert()  # an earlier test's
    held = torch.optim.AdamW.step
    assert_as_by_hand(program)


@pytest.mark.parametrize("reentrant", [False, True])
def test_r18_a_checkpoint_is_recomputed_with_the_weights_of_now(reentrant: bool) -> None:
    def program(cast: Cast) -> list[Tensor]:
        layer, x = made()
        optimizer, seen = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True), []
        for _ in range(3):
            given = x.clone().requires_grad_()
            loss = checkpoint(twice, layer, given, cast, use_reentrant=reentrant).square().mean()
            loss.backward()
            seen += [given.grad, *(p.grad.clone() for p in layer.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_as_by_hand(program)


# What else writes weights that torch counts or hmp sees; more of it in P3, in regions of hmp.casts.
NO_GRAD = torch.no_grad()


def freed_and_filled(layer: nn.Module) -> None:
    with torch.no_grad():
        storage = layer.weight.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        layer.weight.fill_(0.5)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "mul_": NO_GRAD(lambda layer: layer.weight.mul_(0.5)),
    "data = its transpose": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
    "set_ to its transpose": NO_GRAD(lambda layer: layer.weight.set_(layer.weight.detach().t())),
    "freed and filled": freed_and_filled,
    "load_state_dict assign": lambda layer: layer.load_state_dict({key: w * 0.5 for key, w in layer.state_dict().items()}, assign=True),
    "weight = Parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * 0.5)),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(torch.linspace(-1, 1, 272), layer.parameters()),
    "_apply": lambda layer: layer._apply(lambda tensor: tensor * 0.5),
    "half and back": lambda layer: layer.half().float(),
    "frozen and back": lambda layer: layer.requires_grad_(not layer.bias.requires_grad),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("region", REGIONS)
def test_r18_a_write_between_two_uses_of_one_region(region: str) -> None:
    failures = []
    with hmp.convert(policy=hmp.Policy("nothing listed")):  # so that torch is patched once
        for name, write in WRITES.items():

            def program(cast: Cast, write: Callable[[nn.Module], Any] = write) -> list[Tensor]:
                layer, x = made()
                x = x.requires_grad_()
                seen = seen_of(layer, x, cast)
                for _ in range(3):
                    write(layer)
                    seen += seen_of(layer, x, cast)
                return seen

            try:
                assert_as_by_hand(program, REGIONS[region])
            except Exception as error:
                failures.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    assert not failures, "\n".join(failures)


def test_r18_these_programs_use_copies() -> None:
    """Without it each of the tests above would pass by casting at each use."""
    layer, x = made()
    for region in REGIONS.values():
        with hmp.record() as report:
            region(lambda: seen_of(layer, x, plain))
        # the second use of weight and bias in each mode; at first it is learnt that they are used twice
        assert sum(row.casts_saved for row in report.rows) >= 4


def test_r18_memory_at_the_address_of_memory_that_was_freed_is_other_memory() -> None:
    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(2, 64)
    with hmp.casts(POLICY), torch.no_grad():
        for _ in range(3):
            F.linear(x, weight)
        first = weight.data_ptr()
        torch.utils.swap_tensors(weight, nn.Parameter(torch.randn(64, 64)))  # which is gone
        others = [nn.Parameter(torch.randn(64, 64)) for _ in range(50)]
        torch.utils.swap_tensors(weight, next((each for each in others if each.data_ptr() == first), others[0]))
        found = F.linear(x, weight)
    assert torch.equal(found, as_computed(F.linear)(x.to(LOW), weight.to(LOW)))


@pytest.mark.parametrize("region", REGIONS)
def test_r18_a_write_that_torch_does_not_count_is_seen_when_the_region_has_ended(region: str) -> None:
    layer, x = made()
    used_once, often = (lambda cast: [once(layer, x, cast)]), (lambda cast: [once(layer, x, cast) for _ in range(4)])
    aliases = layer.weight.data, layer.weight.detach().numpy(), layer.weight.data[:]
    with hmp.convert(policy=hmp.Policy("nothing listed")):  # so that torch is patched once
        for program, alias, _ in itertools.product((used_once, often, lambda cast: seen_of(layer, x, cast)), aliases, range(4)):
            assert_as_by_hand(program, REGIONS[region])
            alias[:] = alias * 0.5


@pytest.mark.parametrize("region", REGIONS)
def test_r18_what_requires_no_gradient_is_cast_at_each_use(region: str) -> None:
    """As under torch.autocast: numpy, collectives and kernels of one's own fill inputs and buffers again without a count."""

    def program(cast: Cast) -> list[Tensor]:
        weight, x, seen = nn.Parameter(torch.eye(512), requires_grad=False), torch.ones(512, 512), []
        for _ in range(4):
            for given in ((x, weight), (x, torch.eye(512)), (torch.eye(512), weight)):
                seen.append(linear(cast, *given))
                x.numpy()[:] += 1
                weight.numpy()[:] += 1
        return seen

    assert_as_by_hand(program, REGIONS[region])


# --- threads and tasks ------------------------------------------------------------------------


@contextlib.contextmanager
def written_after_each_cast(tensor: Tensor) -> Iterator[None]:
    """Write a tensor as soon as a cast is made, as another thread may."""
    values = itertools.count(2.0)

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and function.__name__ == "bfloat16":
            tensor.detach().fill_(next(values))

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert next(values) > 2


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("shape", [(16, 16), (512, 512)], ids=["weight", "activation"])
def test_r18_a_write_between_a_cast_and_its_use_is_seen_by_the_next(shape: tuple[int, ...], trains: bool) -> None:
    made, other = torch.randn(shape), nn.Parameter(torch.randn(2, shape[1]))
    tensor = nn.Parameter(made) if shape == (16, 16) else made.requires_grad_(trains)

    given = (other, tensor) if shape == (16, 16) else (tensor, other)

    def product() -> Tensor:
        with torch.set_grad_enabled(trains):
            return F.linear(*given)

    with hmp.casts(POLICY):
        for _ in range(2):
            product()
        tensor.detach().neg_()
        with written_after_each_cast(tensor):
            held = product()  # a graph holds the copy of an activation
        found = product().detach()
    del held
    assert torch.equal(found, as_computed(F.linear)(*(each.to(LOW) for each in given)))


def test_r18_tasks_that_take_turns_have_copies_of_their_own() -> None:
    layer, x = made()

    async def serve(policy: hmp.Policy, cast: Cast) -> bool:
        right = True
        for _ in range(3):
            with hmp.casts(policy):
                for _ in range(3):
                    found = [once(layer, x, plain) for _ in range(3)]
                    right &= all(torch.equal(each, once(layer, x, cast)) for each in found)
                    await asyncio.sleep(0)
                    layer.weight.data = layer.weight.data * 0.5
        return right

    async def all_of_them() -> list[bool]:
        with hmp.casts(POLICY):  # the tasks have copies of this context, which ends before they do
            tasks = [asyncio.ensure_future(serve(*each)) for each in ((POLICY, by_hand()), (HALF, by_hand(torch.float16))) * 2]
            once(layer, x, plain)
            await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))

    with torch.no_grad():
        assert asyncio.run(all_of_them()) == [True] * 4


# --- nothing is left --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", REGIONS)
def test_r18_nothing_is_kept_when_a_region_ends(region: str) -> None:
    layer, x = made()
    heads, wide = Heads(), torch.randn(512, 512)

    def work() -> None:
        seen_of(layer, x, plain)
        with torch.no_grad():
            heads(wide)
        heads(wide.requires_grad_()).sum().backward()
        wide.grad = None
        heads.zero_grad()

    def fail() -> None:
        work()
        raise LookupError

    with hmp.convert(policy=hmp.Policy("nothing listed")):
        REGIONS[region](work)
        before = bytes_alive()
        for number in range(101):
            with contextlib.suppress(LookupError):
                REGIONS[region](fail if number % 2 else work)
        assert bytes_alive() == before
