"""What must hold of a training run under a policy, beside the same run in plain float32 torch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from .kit import Model, Run, backward, build, cosine, feed, gradients, train

# A gradient that rounding every weight to bfloat16's eight bits already turns says nothing about casts: the float32 run is
# repeated with each weight off by up to 2**-8 of itself, and what moves by a fifth or more in any of the repetitions, or is a
# thousandth of the median gradient, is not compared. Such are the biases of keys, which softmax cancels, and what stands before a
# batch norm.
SHAKE, SHAKES, STEADY, SMALL = 2.0**-8, (9, 10, 11), 0.2, 1e-3
# The other gradients keep their direction and their length. Measured over the zoo, most are above 0.999; the lowest of each
# policy belong to nets with batch norm over a few values. Without rotations, or with one parameter detached, a model is far below.
COSINE, LENGTH = 0.95, 1.25
# Running statistics are means over bfloat16 activations, kept in float32.
STATISTICS = 0.05


@dataclass(frozen=True)
class Reference:
    """The float32 run, and the parameters whose gradients are worth comparing."""

    run: Run
    steady: frozenset[str]

    @property
    def coverage(self) -> float:
        """Which part of the model's weights is compared."""
        sizes = {name: gradient.numel() for name, gradient in self.run.gradients.items() if gradient is not None}
        return sum(sizes[name] for name in self.steady) / sum(sizes.values())


def reference(model: Model) -> Reference:
    """The model's run in plain float32 torch."""
    run = train(model)
    median = statistics.median(float(g.norm()) for g in run.gradients.values() if g is not None)
    steady = {name for name, exact in run.gradients.items() if exact is not None and float(exact.norm()) > SMALL * median}
    for seed in SHAKES:
        for name, moved in _shaken(model, seed).items():
            exact = run.gradients[name]
            if exact is None or moved is None or float((moved - exact).norm()) >= STEADY * float(exact.norm()):
                steady.discard(name)
    return Reference(run, frozenset(steady))


def _shaken(model: Model, seed: int) -> dict[str, torch.Tensor | None]:
    """The float32 run's gradients with every weight off by a little."""
    shaken = build(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in shaken.parameters():
            parameter.mul_(1 + (2 * torch.rand(parameter.shape, generator=generator) - 1) * SHAKE)
    backward(shaken, feed(model, shaken))
    return gradients(shaken)


def assert_gradients_follow(run: Run, wanted: Reference) -> None:
    """Every parameter has a gradient where float32 has one, in its own dtype; the steady ones have float32's direction and length."""
    problems = []
    for name, exact in wanted.run.gradients.items():
        got = run.gradients[name]
        if exact is None or got is None:
            if exact is not got:
                problems.append(f"{name}: gradient is {'there' if exact is None else 'None'}, in float32 it is not")
        elif got.dtype is not run.before[name].dtype:
            problems.append(f"{name}: gradient in {got.dtype}")
        elif not bool(torch.isfinite(got).all()):
            problems.append(f"{name}: gradient is not finite")
        elif name in wanted.steady:
            direction, length = cosine(got, exact), float(got.norm() / exact.norm())
            if direction < COSINE or not 1 / LENGTH < length < LENGTH:
                problems.append(f"{name}: gradient's cosine with float32's {direction:.3f}, length {length:.2f} of it")
    assert not problems, f"{len(problems)} gradients differ:\n  " + "\n  ".join(problems[:12])


def assert_state_moves(run: Run, wanted: Reference) -> None:
    """What three steps change in float32, weights and statistics, they change here, in the same dtype; the rest stays as it is."""
    assert all(torch.isfinite(torch.tensor(run.losses))), f"losses {run.losses}"
    assert run.output_is_finite or not wanted.run.output_is_finite, "the output is not finite, float32's is"
    exact_after = wanted.run.after
    assert set(exact_after) == set(run.after), set(exact_after) ^ set(run.after)
    problems = []
    for name, exact in exact_after.items():
        before, after = run.before[name], run.after[name]
        moves = not torch.equal(exact, wanted.run.before[name])
        if before.dtype is not exact.dtype or after.dtype is not exact.dtype:
            problems.append(f"{name}: {before.dtype} became {after.dtype}, in float32 {exact.dtype}")
        elif not moves and not torch.equal(before, after):
            problems.append(f"{name}: moved, in float32 it does not")
        elif moves and torch.equal(before, after) and (name in wanted.steady or name not in run.gradients):
            problems.append(f"{name}: did not move")
        elif name.endswith(("running_mean", "running_var")):
            variance = exact_after[name.replace("running_mean", "running_var")].double()
            scale = variance.sqrt() if name.endswith("mean") else variance
            if float((after - exact).norm()) > STATISTICS * float(scale.norm()):
                problems.append(f"{name}: off float32's by {float((after - exact).norm() / scale.norm()):.3f} of the activation's spread")
    assert not problems, f"{len(problems)} parameters or buffers differ:\n  " + "\n  ".join(problems[:12])
