"""A fresh interpreter: what torch itself leaves behind does not reach the tests, and hmp need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_IMPORTS = "import copy, io, pickle, sys\nimport torch\nimport torch.nn.functional as F\n"
_WITHOUT_HMP = "sys.modules['hmp'] = None  # an import of it raises\n"


def run_in_another_process(code: str, *arguments: object, with_hmp: bool = True, path: str = "") -> str:
    """What `code` prints in a process of its own, where torch and, unless told otherwise, hmp are imported; it must not fail."""
    source = _IMPORTS + ("import hmp\n" if with_hmp else _WITHOUT_HMP) + textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (path, str(ROOT) if with_hmp else "") if p)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def alone(tmp_path: Path, script: str) -> None:
    """Runs a script, which imports the kits as tests do, in a process of its own, where torch has compiled nothing yet.

    Compiling for the first time changes torch, and fills tables of torch's.
    """
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script) + "\nprint('done')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.stdout.strip() == "done", done.stderr


def to_install(extra: str) -> str:
    """How an error ends that misses an extra: what works in a checkout, and from an index."""
    return f"pip install -e '.[{extra}]' in hmp's checkout, or pip install 'hmp-torch[{extra}]' once it is released"
