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
    """Benchmark a training or inference step under several policies: time, spread, memory and loss, as a table to print.

    Interleaved: a round takes one sample of each policy, in an order that rotates. A sample is some untimed steps and then timed ones.
    Every sample starts from the same state and the same seeds (torch, random, numpy), so that all policies do the same work and their
    losses compare. Without `model`, `optimizer`, `state` and `reset` the policies train the same weights one after another, and losses do
    not compare. Afterwards, exceptions included, torch is as it was found.

    With several updates in one step (an epoch, LBFGS) torch.autocast, which casts a weight once in a context, would go on with old weights.

    Args:
        step: Does one whole training step (forward, backward, optimizer) or one inference step; it takes no arguments. If it returns the
            loss, a number or a tensor of one element, the table shows it.
        policies: "float32" is torch without casts, "torch.autocast" is torch's own of the device in its default dtype; every other one
            is an hmp policy: a preset's name, a folder or an `hmp.Policy`, active as by `hmp.convert()`, backward included. Default:
            "float32", "torch.autocast" and the lists of the preset `autocast`, named for the device: "torch-cpu".
        model: Its parameters, buffers and gradients are put back before each sample and at the end. Scopes of a policy name its modules.
        optimizer: Its state is put back likewise.
        state: An object or several with state_dict and load_state_dict, which are put back likewise: a scheduler, a gradient scaler.
        reset: Is called where they are put back, to rewind what has no state_dict, such as an iterator over batches.
        seconds: Rounds go on for so long in all, and there are at least three.
        rounds: The number of rounds, instead.
        steps: The timed steps of a sample. Default: as many as fill a fifth of a second.
        warmup: The untimed steps of a sample; one in ten of the timed ones if that is more.
        seed: The seed of every sample.
        device: Where the step computes. Default: the model's device, without a model the accelerator, if there is one, else the CPU.
            Accelerators are synchronised around samples, and their memory is the peak that their allocator reports for one step. On the CPU
            memory is what one forward pass saves for backward, each storage once, parameters left out.
        progress: Whether the rounds are shown on stderr. Default: if that is a terminal.

    Returns:
        The rows. A policy under which the step fails gets the error in its row, and the others go on.

    Raises:
        HmpError: For wrong arguments, before anything has run, and where the step failed under every policy.

    Example:
        >>> net, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
        >>> result = hmp.benchmark(lambda: net(x).sum().backward(), ["float32", "habana"], model=net, rounds=3, steps=1)
        >>> [row.name for row in result]
        ['float32', 'habana']
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
