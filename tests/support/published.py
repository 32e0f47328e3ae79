"""The corpus of published lists and configurations, beside the checkout, and the mark of the tests that need it."""

from __future__ import annotations

from pathlib import Path

import pytest

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
LISTS = CORPUS / "habana-lists"
needs_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason=f"the corpus of published lists is not here: {CORPUS}")


def gaudi_files() -> list[Path]:
    """The Gaudi configurations, sorted; none without the corpus."""
    return sorted((CORPUS / "gaudi-configs").glob("*.json"))
