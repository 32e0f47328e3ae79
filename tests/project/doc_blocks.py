"""The blocks of code of a page."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks_of_torch_alone(text: str) -> list[str]:
    """The blocks of Python that need no other package: no `pip install` stands in the paragraph or block right above."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block[1] for block in found if "pip install" not in text[: block.start()].rstrip().rpartition("\n\n")[2]]
