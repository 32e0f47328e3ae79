"""The README's first example and what it prints, for the first page of the site."""

from __future__ import annotations

import re

from . import ROOT


def inserted() -> str:
    """Return the README's first block of Python and the text after it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n.*?^```\n\n```text\n.*?^```\n", readme, re.MULTILINE | re.DOTALL)
    if found is None:
        raise RuntimeError("README.md begins with a block of Python and what it prints")
    return found[0]
