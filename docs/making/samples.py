"""Makes the sample pages: `python docs/making/samples.py FOLDER` writes them, `run()` gives them from a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / x.shape[-1] ** 0.5
        return scores.softmax(-1) @ self.value(x)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.norm, self.head = nn.Linear(16, 32), Attention(32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        x = self.embed(x)
        return self.head(self.norm(x + self.attention(x)).mean(1))


def model():
    return Classifier()


def batches():
    return [(torch.randn(16, 12, 16), torch.randint(0, 8, (16,))) for _ in range(8)]


def loss(model, batch):
    x, target = batch
    return F.cross_entropy(model(x), target)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
_COMMAND = "compare recipe.py --policy habana --html comparison.html"


def inserted() -> str:
    """Return the links to the sample pages."""
    return """Sample pages, each one file that needs no network: [a report](../samples/report.html), [a comparison with
float32](../samples/comparison.html), [two programs](../samples/captures.html), [a search by tune](../samples/tuning.html).
"""


def run() -> dict[str, bytes]:
    """The samples by name. They are made by another process, since this one's torch is not to be patched."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the samples could not be made:\n{done.stdout}\n{done.stderr}")
        return {file.name: file.read_bytes() for file in Path(folder).glob("*.*")}


def write() -> None:
    """Writes all samples into the current folder."""
    import torch

    import hmp
    from hmp import cli

    Path("recipe.py").write_text(RECIPE, encoding="utf-8")
    sys.path.insert(0, ".")
    import recipe

    if status := cli.main(_COMMAND.split()):
        raise SystemExit(f"hmp {_COMMAND} ended with {status}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batches = recipe.model(), recipe.batches()
    with hmp.casts("habana"), hmp.record() as report:
        recipe.loss(model, batches[0]).backward()
    report.to_html("report.html")
    for name, policy in (("trainer", "habana"), ("server", "autocast")):
        with hmp.capture(f"{name}.capture", model), hmp.casts(policy), torch.no_grad():
            model(batches[0][0])
    compared = hmp.compare_captures("trainer.capture", "server.capture")
    compared.to_html("captures.html")
    options = {"start": "habana", "tolerance": 0.01, "objective": "memory", "max_trials": 8, "steps": 8, "progress": False}
    tuned = hmp.tune(model, batches, loss=recipe.loss, optimizer=recipe.optimizer, **options)
    tuned.to_html("tuning.html")


if __name__ == "__main__":
    import os

    sys.path.insert(0, str(ROOT))
    os.chdir(sys.argv[1])
    write()
