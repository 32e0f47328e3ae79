"""The pages of what was measured: the files that the benchmarks wrote, with their pictures."""

from __future__ import annotations

from pathlib import Path

from . import ROOT

_RESULTS = ROOT / "benchmarks" / "results"


def pages() -> dict[str, str | Path]:
    """Benchmarks, tuning, FP8, a GPU and models, with the pictures that stand in them."""
    found: dict[str, str | Path] = {
        "evidence/benchmarks.md": _page("RESULTS.md", "Benchmarks"),
        "evidence/tuning.md": _page("TUNING.md", "Tuned lists"),
        "evidence/fp8.md": _page("FP8.md", "What FP8 can compute"),
        "evidence/h100.md": _page("nvidia-h100-80gb-hbm3.md", "On an NVIDIA H100"),
        "evidence/h200.md": _page("nvidia-h200.md", "On an NVIDIA H200"),
        "evidence/models.md": _page("ZOO.md", "A first step of the model zoo"),
    }
    return found | {f"evidence/{picture.name}": picture for picture in sorted(_RESULTS.glob("*.png"))}


def _page(name: str, title: str) -> str:
    text = (_RESULTS / name).read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    if not first.startswith("# "):
        raise RuntimeError(f"{name} does not open with its title")
    return f"# {title}\n{rest}"
