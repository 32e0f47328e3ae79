"""Tiny random models of transformers: what they are, how they are fed and trained, and what is checked about them.

Importing this package imports transformers; tests ask `pytest.importorskip("transformers")` first.
"""

from __future__ import annotations

from .families import FAMILIES, MODELS

__all__ = ["FAMILIES", "MODELS"]
