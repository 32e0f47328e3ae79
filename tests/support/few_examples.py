"""How many examples a property of the rules is tried with: there are hundreds of these properties, and each run draws others."""

from __future__ import annotations

from hypothesis import settings

RULES = settings(deadline=None, max_examples=10)
