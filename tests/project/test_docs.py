"""Every Python block of the pages in docs/ runs, each in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S))
]


def test_the_pages_hold_blocks_and_no_others() -> None:
    assert len(BLOCKS) >= 7
    for page in DOCS.glob("*.md"):
        assert set(re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.M)) <= {"python", "text", ""}


@pytest.mark.parametrize("block", BLOCKS)
def test_docs_run(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block)
    root = str(DOCS.parent)
    command = [
        sys.executable,
        "-c",
        f"import sys, runpy; sys.path.insert(0, {root!r}); runpy.run_path({str(script)!r}, run_name='__main__')",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
