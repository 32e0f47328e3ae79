"""``hmp demo``: a small model in float32, under torch.autocast and under hmp, benchmarked, recorded and verified."""

from __future__ import annotations

import argparse
import sys

from ...errors import HmpError, to_install
from ...tools.extras import lacking
from ..output import Parser


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "demo",
        example="hmp demo --epochs 3",
        help="train a small model in float32 and under hmp, and show what ran where",
        description="Benchmarks a training step of a small network for scikit-learn's handwritten digits in float32, under torch.autocast "
        "and under hmp. Then trains the network in float32 and under hmp. Fails if an op did not run in the dtype that its list names, or "
        "if hmp's accuracy differs from float32's by more than one percentage point.",
    )
    parser.add_argument("--epochs", type=int, default=12, metavar="N", help="train for N epochs (default 12); fewer lower the accuracy")


def run(options: argparse.Namespace) -> int:
    """Return 0 if the demo's own check passed, 1 if it failed, 2 if a package that it needs is missing or too old."""
    if options.epochs < 1:
        raise HmpError(f"--epochs {options.epochs}: expected a number of epochs, 1 or more")
    if lacks := lacking("demo"):
        print(f"hmp demo needs {lacks}: {to_install('demo')}", file=sys.stderr)
        return 2
    from . import digits  # after the question above: it imports what may be missing

    return digits.demonstrate(options.epochs)
