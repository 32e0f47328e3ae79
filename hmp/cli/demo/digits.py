"""The demo itself: a classifier of handwritten digits under torch.autocast's lists, then under a list file, and a NaN that is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import indent

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hmp

from ...tools.benchmark import NOISY

_BATCH, _TEST, _POINTS = 64, 597, 1.0  # of 1,797 pictures: one of the test pictures is a sixth of a percentage point
_INSET = "   "


class Attention(nn.Module):
    """Attention of one sequence to itself, in plain torch functions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.softmax, self.out = nn.Linear(width, 3 * width), nn.Softmax(-1), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, positions, width) for the same."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = torch.matmul(q * self.scale, k.transpose(-2, -1))
        return self.out(torch.matmul(self.softmax(scores), v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two convolutions, an attention block over what they make of the picture, and a linear layer."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, width // 2, 3, padding=1, bias=False), nn.BatchNorm2d(width // 2)
        self.conv2, self.norm2 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.norm3, self.attention, self.head = nn.LayerNorm(width), Attention(width, heads), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of (N, 1, 8, 8) pictures."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.relu(self.norm2(self.conv2(x))).flatten(2).transpose(1, 2)
        logits: torch.Tensor = self.head((x + self.attention(self.norm3(x))).mean(1))
        return logits


class Training:
    """The network under a policy, or in float32 where it is None, with its optimizer and its data."""

    def __init__(self, seed: int, policy: str | None = None, dtype: torch.dtype | None = None) -> None:
        bunch = load_digits()
        order = torch.randperm(len(bunch.data), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(bunch.data, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16.0
        labels = torch.tensor(bunch.target, dtype=torch.int64)[order]
        self.images, self.labels = images[_TEST:], labels[_TEST:]
        self.test_images, self.test_labels = images[:_TEST], labels[:_TEST]
        torch.manual_seed(seed)
        self.model = Net()
        if policy is not None:
            hmp.apply(self.model, policy, dtype=dtype, outputs="float32")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, chosen: torch.Tensor | slice = slice(_BATCH)) -> torch.Tensor:
        """Train with the chosen pictures, and return the loss."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.images[chosen]), self.labels[chosen])
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, epochs: int) -> float:
        """Train, with a learning rate that decays, and return the percentage of the test pictures that are then classified correctly."""
        each = len(self.images) // _BATCH  # an incomplete last batch of an epoch is left out
        decay = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.05, total_iters=epochs * each)
        for _ in range(epochs):
            for chosen in torch.randperm(len(self.images))[: each * _BATCH].split(_BATCH):
                self.step(chosen)
                decay.step()
        self.model.eval()
        with torch.no_grad():
            right = int((self.model(self.test_images).argmax(1) == self.test_labels).sum())
        self.model.train()
        return 100.0 * right / _TEST


def demonstrate(*, epochs: int, seed: int, folder: Path) -> int:
    """Train under two policies, find a planted Inf, write the files; return 0 if the check passed, else 1."""
    failures: list[str] = []
    float32 = Training(seed).train(epochs)
    print(f"A small network for handwritten digits. In float32 it reads {float32:.1f} % of {_TEST} other pictures correctly.\n")

    print("1. torch.autocast's op lists: hmp.apply(model)\n")
    _trained("autocast", float32, epochs, seed, failures)

    print("\n2. The same lists with softmax in float32: a folder of text files\n")
    lists = folder / "my_lists"
    lists.mkdir(parents=True, exist_ok=True)
    for name, text in (("base.txt", "autocast\n"), ("fp32.txt", "softmax   # the scores of attention\n")):
        (lists / name).write_text(text, encoding="utf-8")
        print(f"   {lists / name}: {text}", end="")
    print(f'\n   hmp.apply(model, "{lists}")\n')
    training = _trained(str(lists), float32, epochs, seed, failures)

    print("\n3. A planted mistake: the scale of attention is 80,000 times too large, in float16\n")
    broken = Training(seed, str(lists), torch.float16)
    broken.model.attention.scale *= 8e4
    try:
        with hmp.detect_nonfinite():
            broken.step()
        failures.append("expected the planted Inf to be found, got a step without an error")
    except hmp.NonFiniteError as error:
        here = Path(__file__)  # findings leave hmp's own lines out
        lines = here.read_text(encoding="utf-8").splitlines()
        line = next(number for number, text in enumerate(lines, 1) if "self.scale, k" in text)
        print(indent(str(replace(error.finding, file=here.name, line=line)), _INSET))

    print("\n4. What ran in which dtype, and why\n")
    page = folder / "report.html"
    with hmp.record() as report:
        training.step()
    report.to_html(str(page))
    print(f"   open {page.resolve()} in a browser")
    try:
        report.verify()
    except hmp.HmpError as error:
        failures.append(str(error))
    _time(training)

    for failure in failures:
        print(f"\ncheck failed: {failure}")
    if not failures:
        print(f"\ncheck passed: every op ran in the dtype that its list names, and accuracies are within {_POINTS:g} point of float32's")
    return 1 if failures else 0


def _trained(policy: str, float32: float, epochs: int, seed: int, failures: list[str]) -> Training:
    training = Training(seed, policy)
    print(indent(str(hmp.summary(training.model, training.images[:_BATCH])), _INSET))
    accuracy = training.train(epochs)
    print(f"\n   trained for {epochs} epochs: {accuracy:.1f} % correct, float32 {float32:.1f} %")
    if abs(accuracy - float32) > _POINTS:
        failures.append(f"expected the accuracy under {policy} within {_POINTS:g} percentage point of float32's, got {accuracy:.1f} %")
    return training


def _time(training: Training) -> None:
    """Print how long a step takes where the machine is quiet enough to say."""
    hmp.revert()  # the policies of all models: each row has its own
    result = hmp.benchmark(
        training.step, ["float32", "torch.autocast", "autocast"], model=training.model, optimizer=training.optimizer, seconds=5
    )
    if all(row.seconds and row.noise <= NOISY for row in result):
        print("\n5. Time\n\n" + indent(str(result), _INSET))
        if (result["autocast"].ratio or 0) >= 1:
            print("   Here low precision saves memory but no time; hmp doctor shows which dtypes the processor has instructions for.")
