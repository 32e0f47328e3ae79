"""Draws front_page.png and front_page_dark.png, the pictures of the README: `python docs/images/front_page.py`, with chromium on the path.

The module tree is cut out of a report's page as it is, and the finding is what detect_nonfinite() said, less the folder of this checkout.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import hmp  # noqa: E402 - of this checkout, installed or not

WIDTH, HEIGHT = 1160, 790
EXAMPLE = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        return scores.softmax(-1) @ self.value(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.head = Attention(64), nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.norm(x + self.attention(x))).log_softmax(-1)
"""
STYLE = f"""
body {{ width: {WIDTH}px; padding: 14px 20px; }}
.tools, small {{ display: none; }}
h2 {{ margin: 6px 0 8px; }}
pre.finding {{ white-space: pre-wrap; font-size: 13.5px; line-height: 1.55; margin: 8px 0; }}
"""


def main() -> None:
    torch.set_num_threads(1)  # so that no time is one of waiting for another thread
    model_class = _example()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        text = _page(_recording(model_class, Path(folder)), _finding(model_class))
        browser = shutil.which("chromium") or shutil.which("chromium-browser")
        if browser is None:
            raise SystemExit("chromium is not on the path: install it, for it takes the picture")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1.5", f"--window-size={WIDTH},{HEIGHT}"]
        for name, theme in (("front_page", "light"), ("front_page_dark", "dark")):
            page.write_text(f'<!doctype html><html data-theme="{theme}">{text}</html>', encoding="utf-8")
            subprocess.run([browser, *options, f"--screenshot={HERE / name}.png", page.as_uri()], check=True, capture_output=True)


def _example() -> type[torch.nn.Module]:
    names: dict[str, type[torch.nn.Module]] = {"__name__": "train"}  # type: ignore[dict-item]
    exec(compile(EXAMPLE, "train.py", "exec"), names)
    return names["Model"]


def _recording(model_class: type[torch.nn.Module], folder: Path) -> str:
    """The page of a recorded forward and backward pass, under Habana's lists."""
    torch.manual_seed(0)
    model = hmp.apply(model_class(), "habana")
    reports = []
    for _ in range(9):
        with hmp.record() as report:
            model(torch.randn(8, 32, 64)).sum().backward()
        reports.append(report)
    # the first call pays for what torch does once, and others wait for the machine
    quickest = min(reports, key=lambda report: sum(row.seconds for row in report.rows))
    quickest.to_html(folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def _finding(model_class: type[torch.nn.Module]) -> str:
    """What is said of the same model in float16, whose largest number is 65,504."""
    torch.manual_seed(0)
    model = hmp.apply(model_class(), hmp.Policy.load("habana").replace(dtype="float16"))
    try:
        with hmp.detect_nonfinite():
            model(1000 * torch.randn(8, 32, 64)).sum().backward()
    except hmp.NonFiniteError as error:
        return str(error).replace(f"{ROOT}/", "")
    raise SystemExit("nothing overflowed: the picture would be without a finding")


def _page(report: str, finding: str) -> str:
    style = "".join(re.findall(r"<style>.*?</style>", report, re.DOTALL))
    (tree,) = re.findall(r'<section id="tree">.*?</section>', report, re.DOTALL)
    unfolded = tree.replace("<details", "<details open").replace(" open open", " open")
    said = f"<h2>The first op that made an Inf</h2><pre class='finding'>{html.escape(finding)}</pre>"
    return f'<meta charset="utf-8">{style}<style>{STYLE}</style><body>{unfolded}{said}</body>'


if __name__ == "__main__":
    main()
