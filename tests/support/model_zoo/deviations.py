"""`PYTHONPATH=tests/support python -m model_zoo.deviations`: how far a first training step of each model is from float32's, by policy.

Writes benchmarks/results/ZOO.md; about twenty minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

import hmp

from . import FAMILIES, MODELS, shrunk
from .kit import Model, Policy, Run, is_there, train

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
# Without the lines for single modules heads are in FP8 too.
POLICIES: Mapping[str, Policy] = {"habana": "habana", "torch-cpu": "torch-cpu", "fp8": hmp.Policy.load("fp8").unscoped}

# The zoo's families, then those of the architectures that one rule makes tiny.
NAMES: Mapping[str, Sequence[str]] = {family: [model.name for model in models] for family, models in FAMILIES.items()} | shrunk.FAMILIES

# (relative change of the loss, cosine of the gradient with float32's)
Deviation = tuple[float, float]


def deviations(model: Model) -> dict[str, Deviation]:
    """Those of the model's first step, by policy; NaN for what is not finite."""
    exact = train(model, steps=1)
    return {name: _deviation(train(model, policy, steps=1), exact) for name, policy in POLICIES.items()}


def _deviation(run: Run, exact: Run) -> Deviation:
    loss, wanted = run.losses[0], exact.losses[0]
    pairs = [(run.gradients[name], gradient) for name, gradient in exact.gradients.items() if gradient is not None]
    if any(own is None for own, _ in pairs) or not all(map(math.isfinite, (loss, wanted))):
        return math.nan, math.nan
    own, other = (torch.cat([pair[at].double().flatten() for pair in pairs]) for at in (0, 1))
    return abs(loss - wanted) / max(abs(wanted), 1e-12), float(torch.dot(own, other) / (own.norm() * other.norm()))


def report(found: Mapping[str, Mapping[str, Deviation]], command: str) -> str:
    """The page: a line for each family and policy, then the models that are furthest away."""
    lines = [
        "# A first step of the model zoo, beside float32's",
        "",
        f"`{command}`, torch {torch.__version__}, on a CPU, where FP8 is emulated. Written by the command.",
        "",
        f"{len(found)} architectures of transformers with random weights, most of them 32 wide: they show where rounding goes, not what a "
        "trained model loses. Loss: relative change of the first step's. Gradient: cosine of all weights' gradients as one vector with "
        "float32's. Under `fp8` every `linear` whose dimensions allow it is in FP8, heads too; other products, such as GPT-2's `addmm`, "
        "are in bfloat16.",
        "",
        "| models | number | policy | finite | loss, median | loss, worst | gradient, median | gradient, worst |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for family, names in (*NAMES.items(), ("all", list(found))):
        of = [found[name] for name in names if name in found]
        lines += [_line(family, policy, [each[policy] for each in of]) for policy in POLICIES if of]
    far = sorted(found, key=lambda name: (math.isfinite(found[name]["fp8"][1]), found[name]["fp8"][1]))[:10]
    lines += ["", "Furthest from float32 under `fp8`, by the gradient:", ""]
    lines += [f"- {name}: {', '.join(f'{policy} {cosine:.3f}' for policy, (_, cosine) in found[name].items())}" for name in far]
    return "\n".join(lines) + "\n"


def _line(family: str, policy: str, found: Sequence[Deviation]) -> str:
    finite = [each for each in found if all(map(math.isfinite, each))]
    losses, cosines = [loss for loss, _ in finite] or [math.nan], [cosine for _, cosine in finite] or [math.nan]
    cells = [family, str(len(found)), policy, f"{len(finite)} of {len(found)}", f"{median(losses):.2%}", f"{max(losses):.1%}"]
    return "| " + " | ".join([*cells, f"{median(cosines):.4f}", f"{min(cosines):.3f}"]) + " |"


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes; 1 where something is not finite."""
    options = argparse.ArgumentParser(prog="python -m model_zoo.deviations", description=__doc__)
    options.add_argument("--models", help="of the zoo, with commas between them (all that the installed transformers has)")
    options.add_argument("--write", type=Path, default=RESULTS, metavar="FOLDER", help="for ZOO.md")
    given = options.parse_args(arguments)
    known = [name for family in NAMES.values() for name in family]
    names = given.models.split(",") if given.models else known
    if unknown := set(names) - set(known):
        options.error(f"not in the zoo: {', '.join(sorted(unknown))}")
    found = {}
    for name in names:
        if not (MODELS[name].available if name in MODELS else is_there(name)):
            continue
        found[name] = deviations(MODELS[name] if name in MODELS else shrunk.shrunk(name))
        print(name, *(f"{policy} {loss:.2%} {cosine:.3f}" for policy, (loss, cosine) in found[name].items()), sep="  ", flush=True)
    given.write.mkdir(parents=True, exist_ok=True)
    words = ["PYTHONPATH=tests/support python -m model_zoo.deviations", *([f"--models {given.models}"] if given.models else [])]
    (given.write / "ZOO.md").write_text(report(found, " ".join(words)), encoding="utf-8")
    return 0 if all(map(math.isfinite, (value for each in found.values() for pair in each.values() for value in pair))) else 1


if __name__ == "__main__":
    sys.exit(main())
