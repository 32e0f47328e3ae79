"""What .ci/releases runs with each release of transformers: the tests of the stand-in for optimum.habana and of HMPCallback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import accelerate
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("optimum_configuration", "optimum_training", "optimum_scripts", "transformers")


def tests() -> str:
    """What pytest says of them, the slow ones among them."""
    files = [f"tests/compat/test_compat_{name}.py" for name in TESTS]
    chosen = ("-m", "not nightly", "-k", "not real_package")  # those take a release of their own
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
        return "fails: " + ", ".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    return done.stdout.strip().splitlines()[-1].rpartition(" in ")[0]


if __name__ == "__main__":
    releases = {"transformers": transformers.__version__, "accelerate": accelerate.__version__, "torch": torch.__version__}
    print(json.dumps(releases | {"tests": tests()}))
