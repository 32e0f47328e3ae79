"""``hmp init``: a recipe that runs as it is, and says what to change."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .parser import Parser

RECIPE = '''\
"""A recipe: what hmp has to know of a model. It runs as it is; put your own in where it says CHANGE.

    hmp benchmark recipe.py    time, memory and loss in float32, under torch.autocast and under op lists
    hmp compare recipe.py      how far each op is from float32
    hmp tune recipe.py         writes op lists for this model into the folder tuned
"""

import torch
from torch import nn
from torch.nn import functional as F

# CHANGE: where model and batches are
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = 4


# CHANGE: import your own model, and return it from model() with the weights that training is to begin with
class WaveReader(nn.Module):
    """A small transformer that says which kind of wave it was shown."""

    def __init__(self, width=64, patch=8, patches=8):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch, width)
        self.position = nn.Parameter(0.02 * torch.randn(patches, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, KINDS)

    def forward(self, waves):
        tokens = self.embed(waves.unflatten(1, (-1, self.patch))) + self.position
        return self.head(self.layers(tokens).mean(1))


def model():
    return WaveReader().to(DEVICE)


# CHANGE: your own data
def waves(count, seed):
    """Noisy waves of four kinds with any frequency and phase, and the kind of each: sine, square, triangle, sawtooth."""
    random = torch.Generator().manual_seed(seed)
    frequency, phase = 1 + 3 * torch.rand(count, 1, generator=random), torch.rand(count, 1, generator=random)
    turn = (torch.linspace(0, 1, 64) * frequency + phase) % 1
    shapes = [torch.sin(2 * torch.pi * turn), torch.sign(turn - 0.5), 4 * (turn - 0.5).abs() - 1, 2 * turn - 1]
    kind = torch.randint(KINDS, (count,), generator=random)
    wave = torch.stack(shapes)[kind, torch.arange(count)] + 0.1 * torch.randn(count, 64, generator=random)
    return wave.to(DEVICE), kind.to(DEVICE)


def batches():
    """An iterable, such as a list or a DataLoader, of whatever loss() takes; the first 16 are used, and more with hmp tune --steps."""
    for number in range(64):
        yield waves(128, seed=number)


# CHANGE: calls the model and returns a tensor with one number
def loss(model, batch):
    wave, kind = batch
    return F.cross_entropy(model(wave), kind)


# CHANGE: your optimizer; without this function nothing trains, and only losses and gradients are compared
def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


# CHANGE: a number, the larger the better, on data that was not trained on; without this function hmp tune watches the loss
@torch.no_grad()
def metric(model):
    wave, kind = waves(1024, seed=1_000_000)
    model.eval()
    accuracy = (model(wave).argmax(-1) == kind).float().mean().item()
    model.train()
    return accuracy
'''


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the subcommand's options."""
    parser = subparsers.add_parser(
        "init",
        example="hmp init recipe.py",
        help="write a recipe to begin with",
        description="Writes a recipe, a Python file that defines model(), batches(), loss(model, batch), optimizer(model) and "
        "metric(model), with a small model that runs as it is and says what to change. hmp benchmark, hmp compare and hmp tune take it. "
        "Exit status 0 done, 2 if the file is there already or cannot be written.",
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default="recipe.py", help="the file to write (default recipe.py)")


def run(options: argparse.Namespace) -> int:
    """Return 0, or 2 if the file cannot be written."""
    file = options.recipe
    try:
        with Path(file).open("x", encoding="utf-8") as stream:
            stream.write(RECIPE.replace("recipe.py", Path(file).name))
    except FileExistsError:
        print(f"hmp init: {file}: is there already; name another file, hmp init other.py, or move this one away", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"hmp init: {file}: cannot be written: {error.strerror or error}; name a file in a folder that is there", file=sys.stderr)
        return 2
    print(f"{file}: a recipe that runs as it is; change what it says CHANGE above. Then:")
    for command, what in (
        ("benchmark", "time, memory and loss, in several precisions"),
        ("compare", "how far each op is from float32"),
        ("tune", "op lists for your model"),
    ):
        print(f"  {f'hmp {command} {file}':{16 + len(file)}}{what}")
    return 0
