"""``hmp demo``: two real models in float32, under torch.autocast and under hmp, as one table that checks itself."""

from __future__ import annotations

import argparse
import sys

from ...errors import to_install
from ...extras import lacking
from ..parser import Parser, positive


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "demo",
        example="hmp demo --epochs 3",
        help="train two small models in three precisions and show what ran where",
        description="Trains a convolutional network and a transformer on scikit-learn's handwritten digits in "
        "float32, under torch.autocast and under hmp, prints one table and the verdict, and fails if an op that the policy names "
        "did not run in the dtype that it names, or if hmp's accuracy is not within one point of float32.",
    )
    parser.add_argument("--epochs", type=positive, metavar="N", help="train each model for N epochs only; accuracy suffers")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and batches (default 0)")
    parser.add_argument("--ops", action="store_true", help="print which ATen ops ran in which dtype, too")


def run(options: argparse.Namespace) -> int:
    """Return 0 if the demo's own check passed, 1 if it failed, 2 if a package that it needs is missing or too old."""
    if lacks := lacking("demo"):
        print(f"hmp demo needs {lacks}: {to_install('demo')}", file=sys.stderr)
        return 2
    from . import show  # after the question above: it imports what may be missing

    return show.demonstrate(epochs=options.epochs, seed=options.seed, ops=options.ops)
