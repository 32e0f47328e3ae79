"""The pages of the site that are made from the code and from what was measured. `made()` gives them all."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # hmp of this checkout, installed or not


def made() -> dict[str, str | bytes | Path]:
    """What stands where on the site: text, bytes, or a file of the checkout."""
    from . import api, command_line, errors, evidence, gaudi, habana_names, json_forms, presets, releases, samples, tutorials

    pages = samples.run()
    return {
        "images/front_page.png": ROOT / "docs" / "images" / "front_page.png",
        "reference/api.md": api.page(),
        "reference/cli.md": command_line.page(),
        "explain/gaudi.md": gaudi.page(),
        "reference/errors.md": errors.page(),
        "reference/habana-names.md": habana_names.page(),
        "reference/presets.md": presets.page(),
        "reference/json.md": json_forms.page(pages),
        "evidence/releases.md": releases.page(),
        "evidence/samples/report.html": pages["report.html"],
        "evidence/samples/comparison.html": pages["comparison.html"],
        "evidence/samples/captures.html": pages["captures.html"],
        "evidence/samples/tuning.html": pages["tuning.html"],
        **evidence.pages(),
        **tutorials.pages(),
    }
