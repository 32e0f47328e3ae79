"""``hmp demo``: a small model under torch.autocast's lists and under lists of one's own, summarized, trained, recorded and verified."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...errors import HmpError, to_install
from ...tools.extras import lacking
from ..output import Parser


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "demo",
        example="hmp demo --epochs 3",
        help="train a small model under torch.autocast's lists and under an edited list, and show what ran",
        description="Trains a small network for scikit-learn's handwritten digits under torch.autocast's op lists, then with softmax moved "
        "to float32 by a list file, finds a planted Inf, and writes a report as a page. Fails if an op did not run in the dtype that its "
        "list names, or if an accuracy differs from float32's by more than one percentage point.",
    )
    parser.add_argument("--epochs", type=int, default=12, metavar="N", help="train for N epochs (default 12); fewer lower the accuracy")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and batches (default 0)")
    parser.add_argument("--folder", type=Path, default=Path("hmp_demo"), help="for the list files and the report (default hmp_demo)")


def run(options: argparse.Namespace) -> int:
    """Return 0 if the demo's own check passed, 1 if it failed, 2 if a package that it needs is missing or too old."""
    if options.epochs < 1:
        raise HmpError(f"--epochs {options.epochs}: expected a number of epochs, 1 or more")
    if lacks := lacking("demo"):
        print(f"hmp demo needs {lacks}: {to_install('demo')}", file=sys.stderr)
        return 2
    from . import digits  # after the question above: it imports what may be missing

    return digits.demonstrate(epochs=options.epochs, seed=options.seed, folder=options.folder)
