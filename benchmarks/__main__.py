"""`python -m benchmarks`: the time that hmp adds to a call, next to what torch.autocast adds. About half a minute."""

from __future__ import annotations

import argparse
import platform

import torch

from .calls import CALLS, measure


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds that the median is taken over (default 9)")
    parser.add_argument("--calls", type=int, default=2000, help="calls of each op in a round (default 2000)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread; nanoseconds, medians of {options.rounds} rounds")
    print(f"{'call':28} {'plain':>8} {'hmp':>8} {'hmp off':>8} {'autocast':>9}   (added to plain)")
    for name in CALLS:
        times = measure(name, options.rounds, options.calls)
        added = [times[side] - times["plain"] for side in ("hmp", "hmp off", "autocast")]
        print(f"{name:28} {times['plain']:8.0f} {added[0]:+8.0f} {added[1]:+8.0f} {added[2]:+9.0f}")


if __name__ == "__main__":
    main()
