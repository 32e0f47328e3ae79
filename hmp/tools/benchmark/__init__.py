"""benchmark(): the user's own training step in several precisions, as one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ...core.policy import Policy
    from .result import Benchmark


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
    warmup: int = 1,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> Benchmark:
    """Time, spread, memory and loss of `step` under each policy, as a table to print: `print(hmp.benchmark(step))`.

    `step` takes no arguments and does one whole training step (forward, backward, optimizer) or one inference step. With several
    updates in one step (an epoch, LBFGS) torch.autocast, which casts a weight once in a region, would go on with old weights. If
    `step` returns the loss, a number or a tensor of one element, the table shows it. "float32" is torch without casts, "autocast" is
    `torch.autocast` of the device in its default dtype; every other entry is an hmp policy: a preset's name, a folder or an
    `hmp.Policy`, in force as by `hmp.convert()`, backward included. (The preset `autocast` is `hmp.Policy.load("autocast")`.) Scoped
    lines of a policy speak of the modules of `model`. By default "float32", "autocast" and hmp with the lists that the preset `autocast`
    stands for here, such as "torch-cpu".

    Interleaved: a round takes one sample of each policy, in an order that rotates. A sample is `warmup` untimed steps (one in
    ten of the timed ones if that is more) and then `steps` timed ones, by default as many as fill a fifth of a second. Rounds go
    on for `seconds` in all, and there are at least three; `rounds` sets their number instead.

    Every sample starts from the same state and the same seeds (torch, random, numpy), so that all policies do the same work and
    their losses compare: what `model` (parameters, buffers, gradients), `optimizer` and each object of `state` (anything with
    state_dict and load_state_dict: a scheduler, a gradient scaler, a second model) hold when benchmark() is called is copied,
    put back before each sample and put back at the end. `reset` is called there too, to rewind what has no state_dict, such as an
    iterator over batches. Without any of these the policies train the same weights one after another, and losses do not compare.

    `device` is where the step computes: by default the model's device, without a model the accelerator, if there is one, else the
    CPU. Accelerators are synchronised around samples, and their memory is the peak that their allocator reports for one step. On
    the CPU memory is what one forward pass saves for backward, each storage once, parameters left out.

    A policy under which the step fails gets the error in its row, and the others go on. `progress` shows the rounds on stderr,
    by default if that is a terminal. Afterwards, exceptions included, torch is as it was found. Raises HmpError before anything
    has run for wrong arguments, and StepError where the step failed under every policy.
    """
    from .runner import run  # here, so that `import hmp` does not pay for it

    return run(
        step,
        policies,
        model=model,
        optimizer=optimizer,
        state=state,
        reset=reset,
        seconds=seconds,
        rounds=rounds,
        steps=steps,
        warmup=warmup,
        seed=seed,
        device=device,
        progress=progress,
    )
