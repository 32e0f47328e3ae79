"""The benchmark itself: arguments are checked, samples collected, rows made of them."""

from __future__ import annotations

import inspect
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ...core.active.regions import disable_casts
from ...core.convert import is_in_place
from ...core.policy.policy import Policy
from ...core.torch_patches import module_calls
from ...core.torch_private import is_any_autocast_enabled
from ...errors import HmpError
from ..model_state import Snapshot, random_state_kept
from .result import Benchmark, BenchmarkRow, StepError
from .sampling import (
    FLOAT32,
    MIN_ROUNDS,
    SAVED,
    Sampler,
    Samples,
    allocated,
    check_there,
    default_names,
    described,
    device_of,
    meter,
    ratios,
    variants,
)

# Two runs of one step from one state differ by less, also where a device adds in no fixed order.
_SAME_LOSS = 1e-3


def benchmark(  # noqa: PLR0913
    step: Callable[[], Any],
    policies: Iterable[str | Path | Policy] | None = None,
    *,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    state: Any = (),
    reset: Callable[[], object] | None = None,
    seconds: float = 30.0,
    rounds: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> Benchmark:
    """Benchmark a training or inference step under several policies: time, spread, memory and loss, as a table to print.

    The policies take turns: a round takes one sample of each policy, in a rotating order. A sample is one untimed step for ten timed ones,
    at least one, then the timed ones. Every sample starts from the same state and the same seeds (torch, random, numpy), so all policies do
    the same work and their losses can be compared. Without `model`, `optimizer`, `state` and `reset` each policy continues the training of
    the previous one, and losses can't be compared. Afterwards torch is as before, also after an exception.

    Don't update the weights several times in one step (an epoch, LBFGS): torch.autocast would keep using the first cast of each weight.

    Args:
        step: A function without arguments that runs one training step (forward, backward, optimizer) or one inference step. If it returns
            the loss, a number or a tensor with one element, the table shows it.
        policies: "float32" is plain torch, "torch.autocast" is PyTorch's autocast in the device's default dtype. Every other one is an hmp
            policy: a preset's name, a folder or an `hmp.Policy`, active as by `hmp.convert()`, also in backward. Default: "float32",
            "torch.autocast" and the lists of the preset `autocast` under the name for the device, such as "torch-cpu".
        model: The model, whose parameters, buffers and gradients are restored before each sample and at the end. Entries with a scope
            match its modules.
        optimizer: The optimizer, whose state is restored too.
        state: One or several other objects with state_dict and load_state_dict that are restored too: a scheduler, a gradient scaler.
        reset: A function called whenever state is restored, to rewind objects without a state_dict, such as an iterator over batches.
        seconds: The time for all rounds; there are at least three.
        rounds: The number of rounds, instead of `seconds`.
        steps: The timed steps of a sample. Default: as many as take 0.2 s.
        seed: The seed of every sample.
        device: The device that the step runs on. Default: the model's device; without a model the accelerator, if there is one, else the
            CPU. Accelerators are synchronised around samples, and their memory is the allocator's peak in one step. On the CPU memory is
            the activation memory of one forward pass, without parameters.
        progress: Show the rounds on stderr. Default: only on a terminal.

    Returns:
        The rows. If the step fails under a policy, its row has the error, and the other policies are still run.

    Raises:
        HmpError: For wrong arguments, before anything has run.
        StepError: The step failed under every policy; it is an HmpError.

    Example:
        >>> net, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
        >>> result = hmp.benchmark(lambda: net(x).sum().backward(), ["float32", "habana"], model=net, rounds=3, steps=1)
        >>> [row.name for row in result]
        ['float32', 'habana']
    """
    _check_step(step)
    _check_numbers(seconds, rounds=rounds, steps=steps)
    _check_surroundings()
    where = _device(device, model)
    untouched = not is_in_place()
    with disable_casts(), random_state_kept(where):
        compared = variants(default_names(where) if policies is None else policies, where, model)
        before = allocated(where)
        snapshot = Snapshot(model, optimizer, state, reset)
        memory_kind, measure = meter(where, snapshot.tensors, allocated(where) - before)
        say = _progress(progress)
        sampler = Sampler(step, snapshot, measure, where, seed, steps, untouched, say)
        try:
            collected = sampler.collect(compared, seconds, rounds)
        finally:
            say("")
            snapshot.restore()
    failures = [samples.failure for samples in collected if samples.failure is not None]
    if len(failures) == len(collected):
        raise StepError(
            f"the step failed under every policy; under {collected[0].variant.name!r} with {described(failures[0])}; "
            "make it run without benchmark() first"
        ) from failures[0]
    baseline = _baseline(collected)
    return Benchmark(
        rows=tuple(_row(samples, baseline) for samples in collected),
        baseline=baseline.variant.name,
        rounds=len(baseline.seconds),
        untimed_steps=sampler.untimed_steps,
        steps=sampler.steps or 0,
        seed=seed,
        losses_compare=snapshot.given,
        memory_kind=memory_kind,
        device=_device_name(where),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        notes=tuple(_notes(collected, snapshot.given, memory_kind, untouched)),
    )


def _check_step(step: Any) -> None:
    if not callable(step):
        raise HmpError(f"step= expected a function without arguments that runs one step, got {type(step).__name__}")
    if error := misfit(step, 0):
        raise HmpError(f"step= expected a function without arguments, got one that needs some ({error}); give lambda: step(...)")


def misfit(function: Callable[..., Any], arguments: int) -> str:
    """Return why a function cannot be called with so many arguments.

    "" where it can, and for one written in C, whose arguments are unknown.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        return str(error)
    return ""


def _check_numbers(seconds: float, **counts: int | None) -> None:
    if not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
        raise HmpError(f"invalid seconds={seconds!r}: expected a positive number")
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < 1):
            raise HmpError(f"invalid {name}={count!r}: expected a whole number, 1 or more")


def _check_surroundings() -> None:
    if is_any_autocast_enabled():
        raise HmpError("torch.autocast is enabled around benchmark(), and would affect every row; call benchmark() outside of it")
    if module_calls.any_applied():
        raise HmpError(
            "a policy is applied to a module by hmp.apply(), and would override the policies to be compared; "
            "call hmp.remove(model) or hmp.revert() first"
        )


def _device(given: Any, model: Any) -> torch.device:
    if given is not None:
        device = device_of(given)
        check_there(device, f"device={given!r}")
        return device
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else iter(())
    first = next(parameters, None)
    if first is not None:
        return torch.device(first.device)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def _device_name(device: torch.device) -> str:
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if name is None or device.type == "cpu" else f"{device.type} ({name(device)})"


def _progress(wanted: bool | None) -> Callable[[str], None]:
    """Show a text in the last line of a terminal, in place of the text before."""
    if wanted is None:
        wanted = sys.stderr is not None and sys.stderr.isatty()
    if not wanted:
        return lambda text: None
    return lambda text: print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _baseline(collected: list[Samples]) -> Samples:
    done = [samples for samples in collected if samples.failure is None]
    return next((samples for samples in done if samples.variant.name == FLOAT32), done[0])


def _row(samples: Samples, baseline: Samples) -> BenchmarkRow:
    seconds = samples.seconds
    error = None if samples.failure is None else described(samples.failure)
    if not seconds:
        return BenchmarkRow(samples.variant.name, memory=samples.memory, error=error)
    first, last = samples.losses[0]
    quarters = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) >= MIN_ROUNDS else None
    return BenchmarkRow(
        name=samples.variant.name,
        seconds=statistics.median(seconds),
        spread=None if quarters is None else quarters[2] - quarters[0],
        ratio=statistics.median(ratios(seconds, baseline.seconds)),
        memory=samples.memory,
        first_loss=first,
        last_loss=last,
        error=error,
        samples=tuple(seconds),
        more=samples.more,
    )


def _notes(collected: list[Samples], restored: bool, memory: str, untouched: bool) -> list[str]:
    notes = []
    if memory == SAVED:
        notes.append("Saved for backward: the activation memory of one forward pass, without the parameters.")
    if not restored:
        notes.append(
            "The losses can't be compared, because each policy continued the training of the previous one. Give model= and optimizer=."
        )
    if not untouched:
        notes.append(
            "hmp was in use before benchmark(), so every row includes the time of its patches. Call hmp.revert() first to time plain torch."
        )
    for samples in collected:
        notes += [note for note in samples.notes if note not in notes]
        name, lasts = samples.variant.name, [loss for _, loss in samples.losses if loss is not None]
        bad = next((loss for pair in samples.losses for loss in pair if loss is not None and not math.isfinite(loss)), None)
        if bad is not None:
            notes.append(f"{name}: the loss became {bad}.")
        elif restored and lasts and max(lasts) - min(lasts) > _SAME_LOSS * max(map(abs, lasts)):
            notes.append(
                f"{name}: repeated runs of the same steps ended at losses from {min(lasts):.5g} to {max(lasts):.5g}, so smaller "
                "differences of losses mean nothing. Pass all state that the step changes (model=, optimizer=, state=), and reset its "
                "batches (reset=)."
            )
    return notes
