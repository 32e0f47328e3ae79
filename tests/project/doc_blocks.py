"""Runs a block of Python of a page, in a process of its own that need not import torch again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 540


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks_of_torch_alone(text: str) -> list[str]:
    """The blocks of Python that need no other package: no `pip install` stands in the paragraph or block right above."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block[1] for block in found if "pip install" not in text[: block.start()].rstrip().rpartition("\n\n")[2]]


def run(code: str, folder: Path) -> str:
    """What the code prints when it is the script block.py in `folder`. The error's traceback is this one's message."""
    # The server imports torch, and calls nothing of it; each process is a fork of the server, as fresh as a new one.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    (folder / "block.py").write_text(code, encoding="utf-8")
    process = context.Process(target=_run, args=(folder, os.environ.get("HMP_LOW_KERNELS", "")))
    process.start()
    process.join(_LIMIT)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"not done after {_LIMIT} seconds:\n{code}")
    printed = (folder / "printed").read_text(encoding="utf-8")
    assert process.exitcode == 0, printed
    return printed


def _run(folder: Path, low_kernels: str) -> None:
    os.chdir(folder)
    os.environ["HMP_LOW_KERNELS"] = low_kernels  # the server has the environment in which it was started
    sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(folder))
    with open("printed", "w", encoding="utf-8") as printed, contextlib.redirect_stdout(printed):
        try:
            # As runpy would, but that puts the main module back at the end, and what pickles the block's classes looks for them there.
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            main.__file__ = str(folder / "block.py")
            exec(compile((folder / "block.py").read_text(encoding="utf-8"), main.__file__, "exec", dont_inherit=True), main.__dict__)
        except BaseException:
            printed.write(traceback.format_exc())
            printed.flush()
            os._exit(1)
